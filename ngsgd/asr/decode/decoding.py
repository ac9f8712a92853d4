"""The beam search through a graph: words, states, lattices.

Costs are negative log probabilities: those of words are in the graph, those of frames come from the acoustic model, times
the acoustic scale.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr import extras
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.utterance import PdfIds
from ngsgd.config import DecodeConfig


@dataclass(frozen=True)
class Path:
    """The best path; no words, no states and infinite cost when none survived the beam."""

    words: tuple[str, ...]
    pdf_T: PdfIds
    cost: float
    # it ends where an utterance may end, not in the middle of a word
    is_complete: bool


def best_path(graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float, max_active: int) -> Path:
    """The best path through `graph`.  `loglik_TP` is log posterior minus log prior of each pdf."""
    return path_of(_searched(graph, loglik_TP, acoustic_scale, beam, max_active), graph)


def timed_path(graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float,
               max_active: int) -> tuple[Path, list[int]]:
    """The best path, and the number of frames before each word label of it."""
    decoder = _searched(graph, loglik_TP, acoustic_scale, beam, max_active)
    found, path = decoder.get_best_path(True)
    frames: list[int] = []
    num_frames = 0
    # a linear path, printed from its start; lines of final states have fewer fields
    for line in path.to_str(show_weight_one=True, fst_field_separator=" ").splitlines() if found else ():
        fields = line.split(" ")
        if len(fields) > 3:
            frames += [num_frames] * (fields[3] != "0")
            num_frames += fields[2] != "0"
    return path_of(decoder, graph), frames


def _searched(graph: Graph, loglik_TP: npt.NDArray[np.float32], acoustic_scale: float, beam: float, max_active: int) -> Any:
    """A FasterDecoder at the end of the utterance; it refers to the graph, which must outlive it."""
    # first: kaldi_decoder takes its graphs
    extras.load("kaldifst", extra="asr", purpose="Decoding")
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    decoder = kaldi_decoder.FasterDecoder(graph.fst, kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active))
    decoder.decode(kaldi_decoder.DecodableCtc(_scaled(loglik_TP, acoustic_scale)))
    return decoder


def path_of(decoder: Any, graph: Graph, *, use_final: bool = True) -> Path:
    """The best path that a FasterDecoder has found; without `use_final` it may end anywhere."""
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
    found, path = decoder.get_best_path(use_final)
    if not found:
        return Path((), np.zeros(0, np.int32), math.inf, is_complete=False)
    _, pdf_labels, word_labels, weight = kaldifst.get_linear_symbol_sequence(path)
    return Path(tuple(graph.words[label - 1] for label in word_labels), np.array(pdf_labels, np.int32) - 1,
                weight.value1 + weight.value2, is_complete=decoder.reached_final())


def lattice(graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float, lattice_beam: float) -> Any:
    """All paths within `lattice_beam` of the best (kaldifst.Lattice): input labels are pdfs + 1, output labels words + 1."""
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph.fst, config)
    decoder.decode(kaldi_decoder.DecodableCtc(_scaled(loglik_TP, acoustic_scale)))
    return decoder.get_raw_lattice()[1]


def write_lattices(folder: FilePath, graph: Graph, utt_ids: Sequence[str], logliks: Sequence[npt.NDArray[np.float32]],
                   config: DecodeConfig, *, acoustic_scale: float) -> None:
    """`folder`/words.txt and one `folder`/UTTERANCE.lat.txt for each utterance; slashes in names become underscores.

    OpenFst's text form: a line is "state state pdf+1 word graph-cost,acoustic-cost", the acoustic cost with its scale.
    """
    folder.mkdir()
    files.write_text(folder / "words.txt", "".join(f"{word} {number}\n" for number, word in enumerate(("<eps>", *graph.words))))
    for utt_id, loglik_TP in zip(utt_ids, logliks, strict=True):
        paths = lattice(graph, loglik_TP, acoustic_scale=acoustic_scale, beam=config.beam,
                        lattice_beam=config.lattice_beam)
        files.write_text(folder / f"{utt_id.replace('/', '_')}.lat.txt", paths.to_str(show_weight_one=True))


def _scaled(loglik_TP: npt.NDArray[np.float32], acoustic_scale: float) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(acoustic_scale * loglik_TP, dtype=np.float32)
