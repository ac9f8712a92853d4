"""sherpa-onnx export: a folder for its offline recognizer, as a WeNet CTC model with a graph.

The input of the network is the filterbanks of sherpa-onnx. Cepstra, normalization, repetition of
edge frames and the acoustic scale are therefore part of the network.

Letters: N sequences, T frames, D feature dimension, B mel filters.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.asr.features.cmvn import SMALLEST_DEVIATION
from ngsgd.config import FeatureConfig
from ngsgd.errors import ConfigError
from ngsgd.exports.onnx import check, convert
from ngsgd.exports.source import Source, StandaloneNetwork, write_graph, write_words
from ngsgd.files import new_directory, write_text
from ngsgd.interface import option

# cepstral lifter of Kaldi
_LIFTER = 22.0


def write(source: Source, output: Path) -> list[Path]:
    """Write the folder: model.onnx, HLG.fst, tokens.txt, words.txt."""
    require_support(source.bundle.features, source.window.side_dim)
    network = UtteranceNetwork(source.network, source.bundle.features, acoustic_scale=source.facts["acoustic_scale"]).eval()
    sequences, frames = torch.export.Dim("N", min=1, max=1 << 16), torch.export.Dim("T", min=2, max=1 << 24)
    # sherpa-onnx reads these; times of words follow from the factor
    facts = {**source.facts, "model_type": "wenet_ctc", "subsampling_factor": 1, "vocab_size": len(source.facts["priors"])}
    inputs = []
    for num_frames in (20, 1, 57):
        fbank_NTB = torch.randn(2, num_frames, source.bundle.features.num_mel_bins,
                                generator=torch.Generator().manual_seed(num_frames))
        inputs.append((10.0 + 3.0 * fbank_NTB, torch.full((2,), num_frames)))
    proto = convert(network, inputs[0], ({0: sequences, 1: frames}, {0: sequences}),
                    input_names=["x", "x_lens"], output_names=["log_probs", "log_probs_lens"], facts=facts)
    check(proto, network, inputs[1:])
    with new_directory(output) as temporary:
        (temporary / "model.onnx").write_bytes(proto.SerializeToString())
        write_graph(source.bundle.graph, temporary / "HLG.fst")
        # a symbol for each pdf; the first state of silence is the blank that sherpa-onnx requires
        symbols = ["<blk>", *(name.replace(" ", "_") for name in source.facts["pdfs"][1:])]
        table = "".join(f"{symbol} {number}\n" for number, symbol in enumerate(symbols))
        write_text(temporary / "tokens.txt", table)
        write_words(source.bundle.graph, temporary / "words.txt")
    return [output]


def require_support(features: FeatureConfig, ivector_dim: int) -> None:
    """Raise ConfigError unless sherpa-onnx can compute the inputs of the network."""
    problems = []
    if features.kind == "given":
        problems.append("features.kind is given, but sherpa-onnx computes filterbanks from audio")
    if features.cmvn not in ("none", "utterance"):
        problems.append(f"features.cmvn is {features.cmvn}, but sherpa-onnx has no speaker statistics")
    if ivector_dim:
        problems.append("the model needs i-vectors, which sherpa-onnx does not compute")
    if problems:
        raise ConfigError([f"{problem}; export with {option('format', 'onnx')} and compute the "
                           "input separately, or train with fbank or mfcc features, "
                           "features.cmvn=utterance and without i-vectors." for problem in problems])


class UtteranceNetwork(nn.Module):
    """Scaled log likelihoods of complete utterances from their filterbanks."""

    cepstra_DB: Tensor | None

    def __init__(self, network: StandaloneNetwork, features: FeatureConfig, *, acoustic_scale: float) -> None:
        super().__init__()
        self.network, self.acoustic_scale = network, acoustic_scale
        self.is_normalized = features.cmvn == "utterance"
        cepstra = torch.from_numpy(mfcc_matrix(features.num_mel_bins, features.num_ceps)).float() \
            if features.kind == "mfcc" else None
        self.register_buffer("cepstra_DB", cepstra)

    def forward(self, fbank_NTB: Tensor, num_frames_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return (N x T x pdfs, frames of each)."""
        x_NTD = fbank_NTB if self.cepstra_DB is None else fbank_NTB @ self.cepstra_DB.T
        if self.is_normalized:
            x_NTD = x_NTD - x_NTD.mean(dim=1, keepdim=True)
            deviation_N1D = x_NTD.square().mean(dim=1, keepdim=True).sqrt()
            x_NTD = x_NTD / deviation_N1D.clamp(min=SMALLEST_DEVIATION)
        window = self.network.window
        first, last = x_NTD[:, :1], x_NTD[:, -1:]
        x_NTD = torch.cat([first] * window.left_context + [x_NTD] + [last] * window.right_context, dim=1)
        # a copy: an input that is an output cannot be exported
        return self.acoustic_scale * self.network(x_NTD), num_frames_N + 0


def mfcc_matrix(num_mel_bins: int, num_ceps: int) -> npt.NDArray[np.float64]:
    """D x B: log filterbanks to MFCC, as in Kaldi with --use-energy=false.

    >>> mfcc_matrix(23, 13).shape
    (13, 23)
    """
    ceps_D, bins_B = np.arange(num_ceps), np.arange(num_mel_bins) + 0.5
    cosine_DB = np.cos(math.pi / num_mel_bins * np.outer(ceps_D, bins_B)) * math.sqrt(2.0 / num_mel_bins)
    cosine_DB[0] = math.sqrt(1.0 / num_mel_bins)
    lifter_D = 1.0 + 0.5 * _LIFTER * np.sin(math.pi * ceps_D / _LIFTER)
    return np.asarray(lifter_D[:, None] * cosine_DB)
