"""Common input of all export formats: the network, the graph, and the facts needed to use them.

Letters: N sequences, T frames with context, F output frames, W frames of a window, D feature
dimension, S values beyond the features, P pdfs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd import __version__
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.features import cmvn
from ngsgd.asr.lang.graphs import Graph
from ngsgd.config import FeatureConfig
from ngsgd.errors import ConfigError
from ngsgd.files import write_text
from ngsgd.interface import option
from ngsgd.models.growing import StagedModel
from ngsgd.models.layers import Window
from ngsgd.models.tdnn import TimeDelayNetwork, TimeLayer


class _Slices(NamedTuple):
    """Splicing of consecutive frames as slices of any length; `Splice` has fixed indices."""

    starts: tuple[int, ...]  # start of each spliced frame in the input
    num_frames: int | torch.SymInt

    def __call__(self, x_NTD: Tensor) -> Tensor:
        """Return N x frames x (K D)."""
        return torch.cat([x_NTD.narrow(1, start, self.num_frames) for start in self.starts], dim=2)


class _LayerPlan(NamedTuple):
    """Splices of a time layer: starts, and the number of frames beyond those of the output."""

    starts: tuple[tuple[int, ...], ...]
    num_extra: tuple[int, ...]

    def of(self, num_frames: int | torch.SymInt) -> tuple[_Slices, ...]:
        return tuple(_Slices(start, num_frames + extra) for start, extra in zip(self.starts, self.num_extra, strict=True))


class StandaloneNetwork(nn.Module):
    """Log likelihoods (log posterior minus log prior) of consecutive frames, for decoders.

    Args:
        model: a trained model in evaluation mode.
        window: how its input rows are made of frames.
        prior_P: class priors.

    Example:
        >>> net = StandaloneNetwork(nn.Linear(9, 2), Window(1, 1, 3), np.array([0.5, 0.5]))
        >>> net(torch.zeros(1, 12, 3)).shape
        torch.Size([1, 10, 2])
    """

    log_prior_P: Tensor

    def __init__(self, model: nn.Module, window: Window, prior_P: npt.NDArray[np.float64]) -> None:
        super().__init__()
        self.network = model.at(model.stage) if isinstance(model, StagedModel) else model
        self.window = window
        self.register_buffer("log_prior_P", torch.from_numpy(np.log(prior_P)).float())
        self._first, self._plans = _plans(self.network, window) \
            if isinstance(self.network, TimeDelayNetwork) else (0, [])

    def forward(self, frames_NTD: Tensor, beside_NS: Tensor | None = None) -> Tensor:
        """Compute log likelihoods, N x F x P, F = T - left context - right context.

        Args:
            frames_NTD: normalized features with their context on both sides.
            beside_NS: i-vectors, one for all frames of a sequence; only if the window has any.
        """
        num_frames = frames_NTD.shape[1] - self.window.left_context - self.window.right_context
        rows = (self._in_time if self._plans else self._spliced)(frames_NTD, beside_NS, num_frames)
        loglik = rows.log_softmax(dim=1) - self.log_prior_P
        return loglik.reshape(frames_NTD.shape[0], num_frames, loglik.shape[1])

    def _spliced(self, frames_NTD: Tensor, beside_NS: Tensor | None, num_frames: int) -> Tensor:
        """Return rows of logits of a model with windows as input."""
        width = self.window.left_context + 1 + self.window.right_context
        x_NFI = _Slices(tuple(range(width)), num_frames)(frames_NTD)
        if beside_NS is not None:
            # `expand` would limit an exported program to more than one frame.
            beside_NFS = beside_NS[:, None] * beside_NS.new_ones(1, num_frames, 1)
            x_NFI = torch.cat([x_NFI, beside_NFS], dim=2)
        logits: Tensor = self.network(x_NFI.flatten(0, 1))
        return logits

    def _in_time(self, frames_NTD: Tensor, beside_NS: Tensor | None, num_frames: int) -> Tensor:
        """Return rows of logits of a TDNN, which computes each frame of its hidden layers once."""
        children = list(self.network.children())
        layers = [child for child in children if isinstance(child, TimeLayer)]
        y = frames_NTD.narrow(1, self._first, self._plans[0].num_extra[-1] + num_frames)
        beside = () if beside_NS is None else (beside_NS,)
        for layer, plan in zip(layers, self._plans[1:], strict=True):
            y = layer(y, plan.of(num_frames), *beside)
            beside = ()
        y = y.flatten(0, 1)
        for child in children:
            y = y if isinstance(child, TimeLayer) else child(y)
        return y


def _plans(network: TimeDelayNetwork, window: Window) -> tuple[int, list[_LayerPlan]]:
    """Return (first required input frame, plans of the input and of each time layer)."""
    # With this number of output frames, the required frames have no gaps.
    num_frames = window.left_context + 1 + window.right_context
    times, plans = np.arange(num_frames), []
    for layer in reversed([child for child in network.children() if isinstance(child, TimeLayer)]):
        times, splices = layer.plan(times)
        plans.append(_LayerPlan(tuple(tuple(splice.index_TK[0].tolist()) for splice in splices),
                                tuple(len(splice.index_TK) - num_frames for splice in splices)))
    assert len(times) == times[-1] - times[0] + 1
    of_input = _LayerPlan(((0,),), (len(times) - num_frames,))
    return int(times[0]) + window.left_context, [of_input, *reversed(plans)]


# version of `Source.facts`; increase it when a key changes its meaning
FACTS_FORMAT = 1


@dataclass(frozen=True)
class Source:
    """A model to export."""

    bundle: Bundle
    network: StandaloneNetwork
    facts: dict[str, Any]  # metadata of the model, by name
    license_id: str

    @classmethod
    def of(cls, bundle: Bundle, license_id: str = "unknown") -> Source:
        """Extract the network of a bundle as a function of frames, and its facts."""
        if bundle.adaptation is not None:
            raise ConfigError(f"{bundle.path} adapts features to speakers (adaptation.lda_dim), "
                              f"which this format cannot hold; use {option('format', 'bundle')}, or train a "
                              "model without adaptation.")
        window, features, language = bundle.window, bundle.features, bundle.language
        is_given = language.given is not None and bundle.decode.graph != "made"
        normalization: dict[str, Any] = {"unit": features.cmvn}
        if features.cmvn == "online" and bundle.all_speech is not None:
            mean_D, deviation_D = cmvn.mean_and_deviation(bundle.all_speech)
            normalization |= {"mean": mean_D.tolist(), "deviation": deviation_D.tolist(),
                              "window": cmvn.WINDOW, "speaker_frames": cmvn.SPEAKER_FRAMES,
                              "global_frames": cmvn.GLOBAL_FRAMES}
        normalization["min_deviation"] = cmvn.SMALLEST_DEVIATION
        facts = {"format": FACTS_FORMAT, "ngsgd_version": __version__, "features": _features(features), "cmvn": normalization,
                 "left_context": window.left_context, "right_context": window.right_context,
                 "edges": "repeat the first and the last frame", "feature_dim": window.feature_dim,
                 "ivector_dim": window.side_dim, "priors": bundle.prior_P.tolist(),
                 "pdfs": list(language.pdf_names(of_graph=is_given)),
                 "words": list(bundle.graph.words), "acoustic_scale": bundle.weights.acoustic_scale,
                 "word_penalty": bundle.weights.word_penalty, "provenance": dict(bundle.provenance)}
        network = StandaloneNetwork(bundle.model, window, bundle.prior_P).eval()
        return cls(bundle, network, facts, license_id)

    @property
    def window(self) -> Window:
        return self.network.window

    def example(self, num_frames: int, seed: int = 0) -> tuple[Tensor, ...]:
        """Return example inputs of the network: two sequences with `num_frames` output frames."""
        generator = torch.Generator().manual_seed(seed)
        width = self.window.left_context + num_frames + self.window.right_context
        sizes = [(2, width, self.window.feature_dim), *([(2, self.window.side_dim)] if self.window.side_dim else [])]
        return tuple(torch.randn(size, generator=generator) for size in sizes)

    @property
    def input_names(self) -> list[str]:
        return ["frames", *(["ivectors"] if self.window.side_dim else [])]

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Free dimensions of the inputs: N sequences, T frames."""
        sequences = torch.export.Dim("N", min=1, max=1 << 16)
        # torch.export specializes a program with a single output frame to that number
        least = self.window.left_context + self.window.right_context + 2
        frames = torch.export.Dim("T", min=least, max=1 << 24)
        return ({0: sequences, 1: frames}, *([{0: sequences}] if self.window.side_dim else []))


def path_of_graph(model: Path) -> Path:
    """Path of the decoding graph next to a model; raises ConfigError if the file exists."""
    path = model.with_suffix(".fst")
    if path == model or path.exists():
        raise ConfigError(f"{path} would be the file of the decoding graph, but it exists; choose "
                          "another name for the model, such as model.onnx in a new folder.")
    return path


def write_graph(graph: Graph, path: Path) -> None:
    """Write the decoding graph as a binary OpenFst file: input pdf + 1, output word + 1."""
    if not graph.fst.write(str(path)):
        raise OSError(f"{path} could not be written")


def write_words(graph: Graph, path: Path) -> None:
    """Write the symbol table of the words of the graph."""
    symbols = enumerate(("<eps>", *graph.words))
    write_text(path, "".join(f"{word} {number}\n" for number, word in symbols))


def _features(config: FeatureConfig) -> dict[str, Any]:
    """Describe the computation of frames from audio; precomputed features are not described."""
    if config.kind == "given":
        return {"kind": "given"}
    of_mfcc = {"num_ceps": config.num_ceps, "use_energy": False} if config.kind == "mfcc" else {}
    return {"kind": config.kind, "sample_rate_hz": config.sample_rate_hz,
            "num_mel_bins": config.num_mel_bins, **of_mfcc, "frame_length_ms": 25,
            "frame_shift_ms": 10, "low_freq_hz": 20, "high_freq_hz": config.sample_rate_hz / 2,
            "window": "povey", "dither": 0, "snip_edges": False, "sample_range": 32768}
