"""The digit loop as a weighted transducer, and the beam search through it.

Input labels are pdf ids + 1 (0 is epsilon), output labels are word numbers + 1.  Costs are negative log probabilities:
those of words are in the graph, those of frames come from the acoustic model, times the acoustic scale.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.asr import extras
from ngsgd.asr.topology import SILENCE_PDF, Topology

EPSILON = 0


@dataclass(frozen=True)
class Graph:
    """What `decode` searches."""

    fst: Any                    # kaldifst.StdVectorFst
    words: tuple[str, ...]      # output label - 1 -> word


def build_graph(topology: Topology, word_penalty: float) -> Graph:
    """Any number of words in any order, each as likely, with silence allowed before, between and after them.

    A word costs log(number of words) + `word_penalty`; leaving a state or staying in it costs nothing.
    """
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
    fst = kaldifst.StdVectorFst()
    loop = fst.add_state()
    fst.start = loop
    fst.set_final(loop, 0.0)
    _add_silence(fst, loop)
    word_cost = math.log(len(topology.words)) + word_penalty
    for word, pdfs in topology.spellings():
        _add_word(fst, loop, pdfs, word_label=topology.words.index(word) + 1, word_cost=word_cost)
    return Graph(fst=fst, words=topology.words)


def decode(
    graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float, max_active: int,
) -> tuple[str, ...]:
    """The words of the best path.  `loglik_TP` is log posterior minus log prior of each pdf."""
    return best_path(graph, loglik_TP, acoustic_scale=acoustic_scale, beam=beam, max_active=max_active)[0]


def best_path(
    graph: Graph, loglik_TP: npt.NDArray[np.float32], *, acoustic_scale: float, beam: float, max_active: int,
) -> tuple[tuple[str, ...], float]:
    """The words of the best path, and its cost; no words and infinity when no path survived the beam."""
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")  # first: kaldi_decoder takes its graphs
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    decoder = kaldi_decoder.FasterDecoder(graph.fst, kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active))
    scaled_TP = np.ascontiguousarray(acoustic_scale * loglik_TP, dtype=np.float32)
    decoder.decode(kaldi_decoder.DecodableCtc(scaled_TP))
    found, path = decoder.get_best_path()
    if not found:
        return (), math.inf
    _, _, labels, weight = kaldifst.get_linear_symbol_sequence(path)
    return tuple(graph.words[label - 1] for label in labels), weight.value1 + weight.value2


def _add_silence(fst: Any, loop: int) -> None:
    silence = fst.add_state()
    _add_arc(fst, loop, silence, pdf=SILENCE_PDF)
    _add_arc(fst, silence, silence, pdf=SILENCE_PDF)
    _add_epsilon(fst, silence, loop)


def _add_word(fst: Any, loop: int, pdfs: tuple[int, ...], *, word_label: int, word_cost: float) -> None:
    state = loop
    for position, pdf in enumerate(pdfs):
        following = fst.add_state()
        if position == 0:
            _add_arc(fst, state, following, pdf=pdf, label=word_label, cost=word_cost)
        else:
            _add_arc(fst, state, following, pdf=pdf)
        _add_arc(fst, following, following, pdf=pdf)
        state = following
    _add_epsilon(fst, state, loop)


def _add_arc(fst: Any, source: int, target: int, *, pdf: int, label: int = EPSILON, cost: float = 0.0) -> None:
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
    fst.add_arc(source, kaldifst.StdArc(pdf + 1, label, cost, target))


def _add_epsilon(fst: Any, source: int, target: int) -> None:
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
    fst.add_arc(source, kaldifst.StdArc(EPSILON, EPSILON, 0.0, target))
