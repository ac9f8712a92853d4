"""Common input of all export formats: the network, the graph, and the facts needed to use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngsgd import __version__
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.features import cmvn
from ngsgd.asr.lang.graphs import Graph
from ngsgd.config import FeatureConfig
from ngsgd.errors import ConfigError
from ngsgd.files import write_text
from ngsgd.interface import option
from ngsgd.models.layers import Window
from ngsgd.models.standalone import StandaloneNetwork

# version of `Source.facts`; increase it when a key changes its meaning
FACTS_FORMAT = 1


@dataclass(frozen=True)
class Source:
    """A model to export."""

    bundle: Bundle
    network: StandaloneNetwork
    # metadata of the model, by name
    facts: dict[str, Any]
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
        facts = {
            "format": FACTS_FORMAT, "ngsgd_version": __version__,
            "features": _features(features),
            "cmvn": _cmvn(features, bundle.all_speech if features.cmvn == "online" else None),
            "left_context": window.left_context, "right_context": window.right_context,
            "edges": "repeat the first and the last frame", "feature_dim": window.feature_dim,
            "ivector_dim": window.side_dim, "priors": bundle.prior_P.tolist(),
            "pdfs": list(language.pdf_names(of_graph=is_given)), "words": list(bundle.graph.words),
            "acoustic_scale": bundle.weights.acoustic_scale,
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
        sizes = [(2, width, self.window.feature_dim),
                 *([(2, self.window.side_dim)] if self.window.side_dim else [])]
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


def _cmvn(config: FeatureConfig, all_speech: cmvn.Stats | None) -> dict[str, Any]:
    """Describe the normalization of features."""
    if all_speech is None:
        return {"unit": config.cmvn, "min_deviation": cmvn.SMALLEST_DEVIATION}
    mean_D, deviation_D = cmvn.mean_and_deviation(all_speech)
    return {"unit": config.cmvn, "mean": mean_D.tolist(), "deviation": deviation_D.tolist(),
            "window": cmvn.WINDOW, "speaker_frames": cmvn.SPEAKER_FRAMES,
            "global_frames": cmvn.GLOBAL_FRAMES, "min_deviation": cmvn.SMALLEST_DEVIATION}
