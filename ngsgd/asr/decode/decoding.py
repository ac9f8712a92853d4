"""Beam search through a decoding graph for words, states and lattices.

Costs are negative log probabilities. The costs of words are in the graph; those of frames come from
the acoustic model, times the acoustic scale.

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


@dataclass(frozen=True)
class Path:
    """The best path; without words and states and with infinite cost if none survived the beam."""

    words: tuple[str, ...]
    pdf_T: PdfIds
    cost: float
    # the path ends in a final state, not in the middle of a word
    is_complete: bool


NO_PATH = Path((), np.zeros(0, np.int32), math.inf, is_complete=False)
# T x P: log posterior minus log prior
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Search:
    """Settings of a search.

    Attributes:
        acoustic_scale: factor of the acoustic scores.
        beam: in the unit of the scaled costs.
        max_active: maximum number of active states.
    """

    acoustic_scale: float
    beam: float
    max_active: int


def best_path(graph: Graph, loglik_TP: Scores, search: Search) -> Path:
    """Return the best path; a graph without states has none."""
    if not graph.fst.num_states:
        return NO_PATH
    return path_of(_searched(graph, loglik_TP, search), graph)


def timed_path(graph: Graph, loglik_TP: Scores, search: Search) -> tuple[Path, list[int]]:
    """Return the best path, and the number of frames before each of its word labels."""
    decoder = _searched(graph, loglik_TP, search)
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


def _searched(graph: Graph, loglik_TP: Scores, search: Search) -> Any:
    """Return a FasterDecoder at the end of the utterance; the graph must outlive it."""
    decoder = new_decoder(graph, search)
    decoder.decode(decodable(loglik_TP, search.acoustic_scale))
    return decoder


def new_decoder(graph: Graph, search: Search) -> Any:
    """Return a FasterDecoder before the first frame; the graph must outlive it."""
    # kaldifst first: kaldi_decoder uses its graphs
    extras.load("kaldifst", extra="asr", purpose="Decoding")
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    options = kaldi_decoder.FasterDecoderOptions(beam=search.beam, max_active=search.max_active)
    return kaldi_decoder.FasterDecoder(graph.fst, options)


def decodable(loglik_TP: Scores, acoustic_scale: float, first_frame: int = 0) -> Any:
    """Return scaled scores for a decoder, from the frame `first_frame` of an utterance."""
    scaled_TP = np.ascontiguousarray(acoustic_scale * loglik_TP, dtype=np.float32)
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    return kaldi_decoder.DecodableCtc(scaled_TP, first_frame)


def path_of(decoder: Any, graph: Graph, *, use_final: bool = True) -> Path:
    """Return the best path of a FasterDecoder; without `use_final` it may end in any state."""
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
    found, path = decoder.get_best_path(use_final)
    if not found:
        return NO_PATH
    _, pdf_labels, word_labels, weight = kaldifst.get_linear_symbol_sequence(path)
    return Path(tuple(graph.words[label - 1] for label in word_labels), np.array(pdf_labels, np.int32) - 1,
                weight.value1 + weight.value2, is_complete=decoder.reached_final())


def lattice(graph: Graph, loglik_TP: Scores, search: Search, *, lattice_beam: float) -> Any:
    """Return all paths within `lattice_beam` of the best (kaldifst.Lattice).

    Input labels are pdfs + 1, output labels words + 1.
    """
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=search.beam, lattice_beam=lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph.fst, config)
    decoder.decode(decodable(loglik_TP, search.acoustic_scale))
    return decoder.get_raw_lattice()[1]


def write_lattices(folder: FilePath, graph: Graph, utt_ids: Sequence[str], logliks: Sequence[Scores],
                   search: Search, *, lattice_beam: float) -> None:
    """Write `folder`/words.txt and `folder`/UTTERANCE.lat.txt for each utterance.

    Slashes in names become underscores. In the text form of OpenFst a line is "state state pdf+1
    word graph-cost,acoustic-cost", with the scaled acoustic cost.
    """
    folder.mkdir()
    files.write_text(folder / "words.txt", "".join(f"{word} {number}\n" for number, word in enumerate(("<eps>", *graph.words))))
    for utt_id, loglik_TP in zip(utt_ids, logliks, strict=True):
        paths = lattice(graph, loglik_TP, search, lattice_beam=lattice_beam)
        files.write_text(folder / f"{utt_id.replace('/', '_')}.lat.txt", paths.to_str(show_weight_one=True))
