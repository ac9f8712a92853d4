"""What every format is made of: the network, the graph, and the facts that a user needs to run
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngsgd import __version__
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import evaluation
from ngsgd.asr.features import cmvn
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import FeatureConfig, RunConfig
from ngsgd.errors import CheckpointError, ConfigError
from ngsgd.files import read_json, write_text
from ngsgd.models.inputs import Window
from ngsgd.models.saved import window_of
from ngsgd.models.standalone import StandaloneNetwork
from ngsgd.pipeline.run import Run
from ngsgd.pipeline.runs.final_model import load_final
from ngsgd.pipeline.runs.run_folder import RunFolder

# of `Source.facts`; raise it when a key changes its meaning
FACTS_FORMAT = 1
_FRAME_SHIFT_S = 0.01


@dataclass(frozen=True)
class Source:
    """A model to export."""

    folder: RunFolder
    config: RunConfig
    corpus: Corpus
    network: StandaloneNetwork
    # with the word penalty
    graph: Graph
    # content of decode/wer.json
    decoded: dict[str, Any]
    # what is written into the model, by name
    facts: dict[str, Any]
    license_id: str

    @property
    def window(self) -> Window:
        return self.network.window

    def example(self, num_frames: int, seed: int = 0) -> tuple[Tensor, ...]:
        """Inputs of the network: two sequences with `num_frames` output frames."""
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
        # torch.export binds a program with a single output frame to that number
        least = self.window.left_context + self.window.right_context + 2
        frames = torch.export.Dim("T", min=least, max=1 << 24)
        return ({0: sequences, 1: frames}, *([{0: sequences}] if self.window.side_dim else []))


def load(run: Run, *, license_id: str, trust: bool) -> Source:
    """Read the final model, the graph and the decoding setting of a run that has ended."""
    model, prior_P = load_final(run.folder, trust=trust)
    about = read_json(run.folder.final / "model.json")
    window = window_of(about)
    decoded = _decoded(run.folder)
    corpus = run.data.corpus
    graph = graphs.with_word_penalty(evaluation.build_graph(corpus.language, run.config.decode),
                                     decoded["word_penalty"])
    is_given = corpus.language.given is not None and run.config.decode.graph != "made"
    stats = corpus.train.cmvn.stats if corpus.train.cmvn else {}
    facts = {
        "format": FACTS_FORMAT, "ngsgd_version": __version__,
        "features": _features(run.config.features),
        "cmvn": _cmvn(run.config.features, stats.get(cmvn.GLOBAL)),
        "left_context": window.left_context, "right_context": window.right_context,
        "edges": "repeat the first and the last frame", "feature_dim": window.feature_dim,
        "ivector_dim": window.side_dim, "priors": prior_P.tolist(),
        "pdfs": list(corpus.language.pdf_names(of_graph=is_given)), "words": list(graph.words),
        "acoustic_scale": decoded["acoustic_scale"], "word_penalty": decoded["word_penalty"],
        "test_wer": decoded["test"],
        "data": {"corpus": run.config.data.corpus, "sets": {
            name: _size(speech) for name, speech in (("train", corpus.train), ("valid", corpus.valid),
                                                     ("test", corpus.test))}}}
    network = StandaloneNetwork(model, window, prior_P).eval()
    return Source(run.folder, run.config, corpus, network, graph, decoded, facts, license_id)


def path_of_graph(model: Path) -> Path:
    """The file next to a model that holds its decoding graph; raises ConfigError if it exists."""
    path = model.with_suffix(".fst")
    if path == model or path.exists():
        raise ConfigError(f"{path} is the decoding graph's file and is taken; choose another name for the model, such as "
                          "model.onnx in a new folder.")
    return path


def write_graph(graph: Graph, path: Path) -> None:
    """The decoding graph, as a binary OpenFst file: pdf + 1 in, word + 1 out."""
    if not graph.fst.write(str(path)):
        raise OSError(f"{path} could not be written")


def write_words(graph: Graph, path: Path) -> None:
    """The symbol table of the graph's words."""
    symbols = enumerate(("<eps>", *graph.words))
    write_text(path, "".join(f"{word} {number}\n" for number, word in symbols))


def _decoded(folder: RunFolder) -> dict[str, Any]:
    try:
        found = read_json(folder.decode / "wer.json")
        if not isinstance(found, dict) or not found.keys() >= {"word_penalty", "acoustic_scale",
                                                               "test"}:
            raise ValueError("wer.json has no setting")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder.path} has not been decoded yet ({error}); finish it with: "
                              f"ngsgd resume {folder.path}") from error
    return found


def _size(speech: SpeechSet) -> dict[str, Any]:
    return {"utterances": len(speech.texts), "speakers": len(set(speech.speakers)),
            "hours": speech.frames.num_frames * _FRAME_SHIFT_S / 3600.0}


def _features(config: FeatureConfig) -> dict[str, Any]:
    """How frames are made of audio; those of the corpus itself are not described."""
    if config.kind == "given":
        return {"kind": "given"}
    of_mfcc = {"num_ceps": config.num_ceps, "use_energy": False} if config.kind == "mfcc" else {}
    return {"kind": config.kind, "sample_rate_hz": config.sample_rate_hz,
            "num_mel_bins": config.num_mel_bins, **of_mfcc, "frame_length_ms": 25,
            "frame_shift_ms": 10, "low_freq_hz": 20, "high_freq_hz": config.sample_rate_hz / 2,
            "window": "povey", "dither": 0, "snip_edges": False, "sample_range": 32768}


def _cmvn(config: FeatureConfig, all_speech: cmvn.Stats | None) -> dict[str, Any]:
    """How features are normalized."""
    if all_speech is None:
        return {"unit": config.cmvn, "min_deviation": cmvn.SMALLEST_DEVIATION}
    mean_D, deviation_D = cmvn.mean_and_deviation(all_speech)
    return {"unit": config.cmvn, "mean": mean_D.tolist(), "deviation": deviation_D.tolist(),
            "window": cmvn.WINDOW, "speaker_frames": cmvn.SPEAKER_FRAMES,
            "global_frames": cmvn.GLOBAL_FRAMES, "min_deviation": cmvn.SMALLEST_DEVIATION}
