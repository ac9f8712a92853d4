"""Recognized words with times and confidences, and the best distinct word sequences.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.asr.decode import calibration as calibrations
from ngsgd.asr.decode import decoding, scoring, word_lattice
from ngsgd.asr.decode.calibration import Calibration
from ngsgd.asr.decode.decoding import Path
from ngsgd.asr.decode.streaming import Search
from ngsgd.asr.decode.word_lattice import WordLattice
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.lang.topology import Topology


class Word(NamedTuple):
    """A recognized word; times in seconds from the first frame, without surrounding silence."""

    word: str
    start_s: float
    end_s: float
    # probability that the word was spoken at this position, 0 to 1
    confidence: float


@dataclass(frozen=True)
class Hypothesis:
    """A word sequence; without words and with infinite cost if no path survived the beam."""

    words: tuple[Word, ...]
    cost: float
    # the path ends in a final state, not in the middle of a word
    is_complete: bool


class Span(NamedTuple):
    """Frames [start, end) of a word."""

    start: int
    end: int


def recognized(
    graph: Graph,
    loglik_TP: npt.NDArray[np.float32],
    search: Search,
    *,
    lattice_beam: float,
    frame_shift_s: float,
    num_best: int = 1,
    calibration: Calibration | None = None,
) -> list[Hypothesis]:
    """Decode one utterance into its best word sequences.

    The words of the first hypothesis are those of `decoding.best_path` and of `StreamingDecoder`.
    Confidences are posteriors of the word lattice at the acoustic scale of the search, with the
    language model at scale 1, as in lattice-to-ctm-conf of Kaldi with an acoustic scale of 1/LMWT.

    Args:
        graph: the decoding graph. With `graph.topology` words start and end where their states do.
            Without it (tied states) a word starts where the graph emits it and ends at the next.
        loglik_TP: log posterior minus log prior of each pdf.
        search: acoustic scale, beam, and maximum number of active states of the best path; lattices
            are limited by the beam only.
        lattice_beam: paths that cost more than the best path plus this are ignored (nats; typical
            8).
        frame_shift_s: seconds per frame, 0.01 for all features of this package.
        num_best: maximum number of distinct word sequences.
        calibration: map from posteriors to confidences; None is the identity.

    Returns:
        At least one and at most `num_best` hypotheses, best first.
    """
    if not len(loglik_TP):
        return [Hypothesis((), math.inf, is_complete=False)]
    best, frames = _searched(graph, loglik_TP, search)
    if not math.isfinite(best.cost):
        return [Hypothesis((), math.inf, is_complete=False)]
    lattice = lattice_of(graph, loglik_TP, search, lattice_beam=lattice_beam)
    convert = _Converter(graph, lattice, frame_shift_s, calibration or Calibration())
    found = [convert(best, frames)]
    # the best sequence is one of these, unless it was outside the beam of the lattice
    for scored in word_lattice.best_sequences(lattice, num_best) if num_best > 1 else ():
        names = tuple(graph.words[label - 1] for label in scored.labels)
        if names != best.words and len(found) < num_best:
            path, frames = _searched(graphs.within(graph, names), loglik_TP, search)
            # the beam of the search may have pruned it
            found += [convert(path, frames)] if path.words == names else []
    return found


def outcomes(
    hypotheses: Sequence[Hypothesis], texts: Sequence[Sequence[str]]
) -> tuple[list[float], list[bool]]:
    """Return the confidence of every recognized word, and whether it is correct.

    Args:
        hypotheses: one for each utterance.
        texts: reference words of each utterance.
    """
    said = [[word.word for word in one.words] for one in hypotheses]
    rows = scoring.score(texts, said, [""] * len(said))[1]
    is_correct = [ref == hyp for row in rows for ref, hyp in row.pairs if hyp != scoring.NOTHING]
    return [word.confidence for one in hypotheses for word in one.words], is_correct


def calibrate(
    graph: Graph,
    logliks: Iterable[npt.NDArray[np.float32]],
    texts: Sequence[Sequence[str]],
    search: Search,
    *,
    lattice_beam: float,
) -> Calibration:
    """Fit the map from posteriors to the fraction of correct words; arguments as in
    `recognized`.
    """
    found = [
        recognized(graph, one, search, lattice_beam=lattice_beam, frame_shift_s=1.0)[0]
        for one in logliks
    ]
    return calibrations.fit(*outcomes(found, texts))


def _searched(
    graph: Graph, loglik_TP: npt.NDArray[np.float32], search: Search
) -> tuple[Path, list[int]]:
    return decoding.timed_path(
        graph,
        loglik_TP,
        acoustic_scale=search.acoustic_scale,
        beam=search.beam,
        max_active=search.max_active,
    )


def lattice_of(
    graph: Graph, loglik_TP: npt.NDArray[np.float32], search: Search, *, lattice_beam: float
) -> WordLattice:
    """Return the word lattice of a nonempty utterance; arguments as in `recognized`.

    The beam is halved while there are too many word sequences.
    """
    raw = decoding.lattice(
        graph,
        loglik_TP,
        acoustic_scale=search.acoustic_scale,
        beam=search.beam,
        lattice_beam=lattice_beam,
    )
    return word_lattice.determinized(raw) or lattice_of(
        graph, loglik_TP, search, lattice_beam=lattice_beam / 2
    )


@dataclass(frozen=True)
class _Converter:
    """Converts paths of one utterance to hypotheses."""

    graph: Graph
    lattice: WordLattice
    frame_shift_s: float
    calibration: Calibration

    def __call__(self, path: Path, frames: Sequence[int]) -> Hypothesis:
        topology, shift_s = self.graph.topology, self.frame_shift_s
        tied = self.graph.phone_states
        pdf_T = path.pdf_T if tied is None else [tied[pdf] for pdf in path.pdf_T]
        spans = spans_of_states(topology, path.words, pdf_T) if topology else None
        if spans is None:
            spans = [
                Span(start, end) for start, end in itertools.pairwise([*frames, len(path.pdf_T)])
            ]
        label_of = {word: label for label, word in enumerate(self.graph.words, start=1)}
        posteriors = word_lattice.confidences(self.lattice, [label_of[word] for word in path.words])
        words = tuple(
            Word(word, span.start * shift_s, span.end * shift_s, self.calibration(posterior))
            for word, span, posterior in zip(path.words, spans, posteriors, strict=True)
        )
        return Hypothesis(words, path.cost, path.is_complete)


def spans_of_states(
    topology: Topology,
    words: Sequence[str],
    pdf_T: Sequence[int] | npt.NDArray[np.int32],
) -> list[Span] | None:
    """Return the frames of each word of an alignment, without silence.

    Args:
        topology: pronunciations and their states.
        words: the words, in their order.
        pdf_T: the state of each frame.

    Returns:
        None if the states do not belong to the words.
    """
    # a state is one character of a regular expression, and its frames are a run of it
    silence = f"[{''.join(map(_char, topology.silence_pdfs))}]*"
    pattern = silence + "".join(f"({_pronunciations(topology, word)}){silence}" for word in words)
    match = re.fullmatch(pattern, "".join(map(_char, pdf_T)))
    return match and [Span(*match.span(number)) for number in range(1, len(words) + 1)]


def _pronunciations(topology: Topology, word: str) -> str:
    return "|".join(
        "".join(f"{_char(pdf)}+" for pdf in topology.pdfs_of(phones))
        for phones in topology.lexicon.get(word, ())
    )


def _char(pdf: int) -> str:
    # from a Unicode plane without special characters of patterns
    return chr(0x10000 + pdf)
