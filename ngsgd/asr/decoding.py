"""Decoding: a loop over words as a finite-state graph of HMM states, and Kaldi's beam search over it.

Letters: T frames, P pdfs (HMM states).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.asr import extras
from ngsgd.asr.scoring import ScoredSet, score
from ngsgd.asr.topology import SILENCE_PDF, Topology
from ngsgd.config import DecodeConfig

LogLikelihoods = npt.NDArray[np.float32]  # T x P: log posterior minus log prior

_STAY = _LEAVE = -math.log(0.5)           # cost of a self-loop and of leaving a state: Kaldi's start for any topology
_PURPOSE = "Decoding"


@dataclass(frozen=True)
class Graph:
    """A decoding graph: input labels are pdf + 1, output labels word index + 1."""

    fst: Any                              # kaldifst.StdConstFst
    words: tuple[str, ...]


def build_graph(topology: Topology, word_penalty: float) -> Graph:
    """Any sequence of words, equally likely, with optional silence before, between and after.

    `word_penalty` is a cost per word, in natural-log units and beside the scaled acoustic costs; more makes fewer words.
    """
    kaldifst = extras.load("kaldifst", extra="asr", purpose=_PURPOSE)
    fst = kaldifst.StdVectorFst()
    loop = fst.add_state()
    fst.start = loop
    fst.set_final(loop, 0.0)
    choice = -math.log(len(topology.words) + 1)          # the words or silence
    for word, pdfs in topology.spellings():
        label = topology.words.index(word) + 1
        shared = math.log(len(topology.lexicon[word]))   # a word's pronunciations share its probability
        _add_path(kaldifst, fst, loop, pdfs, label, -choice + shared + word_penalty)
    _add_path(kaldifst, fst, loop, (SILENCE_PDF,), 0, -choice)
    return Graph(kaldifst.StdConstFst(fst), topology.words)


def _add_path(kaldifst: Any, fst: Any, loop: int, pdfs: Sequence[int], label: int, cost: float) -> None:
    """From the loop state through left-to-right HMM states with self-loops, and back; the first arc carries word and cost."""
    source = loop
    for position, pdf in enumerate(pdfs):
        state = fst.add_state()
        first = position == 0
        fst.add_arc(source, kaldifst.StdArc(pdf + 1, label if first else 0, cost if first else 0.0, state))
        fst.add_arc(state, kaldifst.StdArc(pdf + 1, 0, _STAY, state))
        source = state
        if position == len(pdfs) - 1:
            fst.add_arc(state, kaldifst.StdArc(0, 0, _LEAVE, loop))
        else:
            # the cost of leaving sits on a state of its own, so that the next arc keeps word and graph cost apart
            source = fst.add_state()
            fst.add_arc(state, kaldifst.StdArc(0, 0, _LEAVE, source))


def decode(graph: Graph, loglik_TP: LogLikelihoods, *, acoustic_scale: float, beam: float, max_active: int) -> tuple[str, ...]:
    """The best word sequence; empty when no path through the graph fits the utterance within the beam."""
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose=_PURPOSE)
    kaldifst = extras.load("kaldifst", extra="asr", purpose=_PURPOSE)
    decoder = kaldi_decoder.FasterDecoder(graph.fst, kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active))
    decoder.decode(kaldi_decoder.DecodableCtc(np.ascontiguousarray(acoustic_scale * loglik_TP, dtype=np.float32)))
    found, path = decoder.get_best_path()
    if not found:
        return ()
    _, _, labels, _ = kaldifst.get_linear_symbol_sequence(path)
    return tuple(graph.words[label - 1] for label in labels)


@dataclass(frozen=True)
class Tuned:
    """What a sweep on the valid set chose, and how both sets came out with it."""

    acoustic_scale: float
    word_penalty: float
    valid: ScoredSet
    test: ScoredSet


@dataclass(frozen=True)
class DecodingTask:
    """A set of utterances with what the model says about their frames."""

    utt_ids: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]
    loglik: Sequence[LogLikelihoods]


def tune_and_decode(topology: Topology, valid: DecodingTask, test: DecodingTask, config: DecodeConfig) -> Tuned:
    """Chooses scale and penalty by the word errors on `valid`, never on `test`, and decodes `test` with them."""
    scores: list[tuple[int, float, float, ScoredSet]] = []
    for penalty in config.word_penalties:
        graph = build_graph(topology, penalty)
        for scale in config.acoustic_scales:
            scored = _decode_set(graph, valid, scale, config)
            scores.append((scored.errors.total, scale, penalty, scored))
    _, scale, penalty, scored_valid = min(scores, key=lambda entry: entry[:3])
    return Tuned(scale, penalty, scored_valid, _decode_set(build_graph(topology, penalty), test, scale, config))


def _decode_set(graph: Graph, task: DecodingTask, scale: float, config: DecodeConfig) -> ScoredSet:
    hypotheses = [decode(graph, loglik_TP, acoustic_scale=scale, beam=config.beam, max_active=config.max_active)
                  for loglik_TP in task.loglik]
    return score(task.texts, hypotheses, task.utt_ids)
