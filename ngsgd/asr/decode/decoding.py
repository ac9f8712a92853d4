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
from ngsgd.config import DecodeConfig


@dataclass(frozen=True)
class Path:
    """The best path; without words and states and with infinite cost if none survived the beam."""

    words: tuple[str, ...]
    pdf_T: PdfIds
    cost: float
    # the path ends in a final state, not in the middle of a word
    is_complete: bool


_NO_PATH = Path((), np.zeros(0, np.int32), math.inf, is_complete=False)


def best_path(graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float, max_active: int) -> Path:
    """Return the best path through `graph`.

    Args:
        graph: the decoding graph; one without states has no path.
        loglik_TP: log posterior minus log prior of each pdf.
        acoustic_scale: factor of the acoustic scores.
        beam: search beam, in the unit of the scaled costs.
        max_active: maximum number of active states.
    """
    if not graph.fst.num_states:
        return _NO_PATH
    return path_of(_searched(graph, loglik_TP, acoustic_scale, beam, max_active), graph)


def timed_path(graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float,
               max_active: int) -> tuple[Path, list[int]]:
    """Return the best path, and the number of frames before each of its word labels."""
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
    """Return a FasterDecoder at the end of the utterance; the graph must outlive it."""
    # kaldifst first: kaldi_decoder uses its graphs
    extras.load("kaldifst", extra="asr", purpose="Decoding")
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    decoder = kaldi_decoder.FasterDecoder(graph.fst, kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active))
    decoder.decode(kaldi_decoder.DecodableCtc(_scaled(loglik_TP, acoustic_scale)))
    return decoder


def path_of(decoder: Any, graph: Graph, *, use_final: bool = True) -> Path:
    """Return the best path of a FasterDecoder; without `use_final` it may end in any state."""
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
    found, path = decoder.get_best_path(use_final)
    if not found:
        return _NO_PATH
    _, pdf_labels, word_labels, weight = kaldifst.get_linear_symbol_sequence(path)
    return Path(tuple(graph.words[label - 1] for label in word_labels), np.array(pdf_labels, np.int32) - 1,
                weight.value1 + weight.value2, is_complete=decoder.reached_final())


def lattice(graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float, lattice_beam: float) -> Any:
    """Return all paths within `lattice_beam` of the best (kaldifst.Lattice).

    Input labels are pdfs + 1, output labels words + 1.
    """
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph.fst, config)
    decoder.decode(kaldi_decoder.DecodableCtc(_scaled(loglik_TP, acoustic_scale)))
    return decoder.get_raw_lattice()[1]


def write_lattices(folder: FilePath, graph: Graph, utt_ids: Sequence[str], logliks: Sequence[npt.NDArray[np.float32]],
                   config: DecodeConfig, *, acoustic_scale: float) -> None:
    """Write `folder`/words.txt and `folder`/UTTERANCE.lat.txt for each utterance.

    Slashes in names become underscores. In the text form of OpenFst a line is "state state pdf+1
    word graph-cost,acoustic-cost", with the scaled acoustic cost.
    """
    folder.mkdir()
    files.write_text(folder / "words.txt", "".join(f"{word} {number}\n" for number, word in enumerate(("<eps>", *graph.words))))
    for utt_id, loglik_TP in zip(utt_ids, logliks, strict=True):
        paths = lattice(graph, loglik_TP, acoustic_scale=acoustic_scale, beam=config.beam,
                        lattice_beam=config.lattice_beam)
        files.write_text(folder / f"{utt_id.replace('/', '_')}.lat.txt", paths.to_str(show_weight_one=True))


def _scaled(loglik_TP: npt.NDArray[np.float32], acoustic_scale: float) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(acoustic_scale * loglik_TP, dtype=np.float32)
