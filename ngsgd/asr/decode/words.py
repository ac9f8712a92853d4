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
from ngsgd.asr.decode.decoding import NO_PATH, Path, Scores, Search
from ngsgd.asr.decode.word_lattice import WordLattice
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.lang.topology import Topology

_UNCALIBRATED = Calibration()


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


def recognized(graph: Graph, loglik_TP: Scores, search: Search, *, lattice_beam: float,
               frame_shift_s: float, num_best: int = 1, calibration: Calibration = _UNCALIBRATED,
               ) -> list[Hypothesis]:
    """Decode one utterance into its best word sequences.

    The words of the first hypothesis are those of `decoding.best_path` and of `StreamingDecoder`.
    Confidences are posteriors of the word lattice at the acoustic scale of the search, with the
    language model at scale 1, as in lattice-to-ctm-conf of Kaldi with an acoustic scale of 1/LMWT.

    Args:
        graph: the decoding graph. With `graph.topology` words start and end where their states do.
            Without it (tied states) a word starts where the graph emits it and ends at the next.
        loglik_TP: log posterior minus log prior of each pdf.
        search: settings of the best path; lattices are limited by the beam only.
        lattice_beam: paths that cost more than the best path plus this are ignored (nats; often 8).
        frame_shift_s: seconds per frame, 0.01 for all features of this package.
        num_best: maximum number of distinct word sequences.
        calibration: map from posteriors to confidences. Default: the identity.

    Returns:
        At least one and at most `num_best` hypotheses, best first.
    """
    best, frames = decoding.timed_path(graph, loglik_TP, search) if len(loglik_TP) else (NO_PATH, [])
    if not math.isfinite(best.cost):
        return [Hypothesis((), math.inf, is_complete=False)]
    lattice = lattice_of(graph, loglik_TP, search, lattice_beam=lattice_beam)
    convert = _Converter(graph, lattice, frame_shift_s, calibration)
    found = [convert(best, frames)]
    # the best sequence is one of these, unless it was outside the beam of the lattice
    for scored in word_lattice.best_sequences(lattice, num_best) if num_best > 1 else ():
        names = tuple(graph.words[label - 1] for label in scored.labels)
        if names != best.words and len(found) < num_best:
            path, frames = decoding.timed_path(graphs.within(graph, names), loglik_TP, search)
            # the beam of the search may have pruned it
            found += [convert(path, frames)] if path.words == names else []
    return found


def outcomes(hypotheses: Sequence[Hypothesis],
             texts: Sequence[Sequence[str]]) -> tuple[list[float], list[bool]]:
    """Return the confidence of every recognized word, and whether it is correct."""
    said = [[word.word for word in one.words] for one in hypotheses]
    rows = scoring.score(texts, said, [""] * len(said))[1]
    is_correct = [ref == hyp for row in rows for ref, hyp in row.pairs if hyp != scoring.NOTHING]
    return [word.confidence for one in hypotheses for word in one.words], is_correct


def calibrate(graph: Graph, logliks: Iterable[Scores], texts: Sequence[Sequence[str]], search: Search, *,
              lattice_beam: float) -> Calibration:
    """Fit the map from posteriors to the fraction of correct words (see `recognized`)."""
    found = [recognized(graph, one, search, lattice_beam=lattice_beam, frame_shift_s=1.0)[0]
             for one in logliks]
    return calibrations.fit(*outcomes(found, texts))


def lattice_of(graph: Graph, loglik_TP: Scores, search: Search, *, lattice_beam: float) -> WordLattice:
    """Return the word lattice of a nonempty utterance (see `recognized`).

    The beam is halved while there are too many word sequences.
    """
    raw = decoding.lattice(graph, loglik_TP, search, lattice_beam=lattice_beam)
    return word_lattice.determinized(raw) or lattice_of(graph, loglik_TP, search,
                                                        lattice_beam=lattice_beam / 2)


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
            spans = [Span(*pair) for pair in itertools.pairwise([*frames, len(path.pdf_T)])]
        label_of = {word: label for label, word in enumerate(self.graph.words, start=1)}
        posteriors = word_lattice.confidences(self.lattice, [label_of[word] for word in path.words])
        words = tuple(
            Word(word, span.start * shift_s, span.end * shift_s, self.calibration(posterior))
            for word, span, posterior in zip(path.words, spans, posteriors, strict=True)
        )
        return Hypothesis(words, path.cost, path.is_complete)


def spans_of_states(topology: Topology, words: Sequence[str],
                    pdf_T: Sequence[int] | npt.NDArray[np.int32]) -> list[Span] | None:
    """Return the frames of each word of an alignment, without silence.

    Returns:
        None if the states do not belong to the words.
    """

    def chars(pdfs: Iterable[int], suffix: str = "") -> str:
        # from a Unicode plane without special characters of patterns
        return "".join(f"{chr(0x10000 + pdf)}{suffix}" for pdf in pdfs)

    # a state is one character of a regular expression, and its frames are a run of it
    pattern = silence = f"[{chars(topology.silence_pdfs)}]*"
    for word in words:
        spellings = (chars(topology.pdfs_of(one), "+") for one in topology.lexicon.get(word, ()))
        pattern += f"({'|'.join(spellings)}){silence}"
    match = re.fullmatch(pattern, chars(pdf_T))
    return match and [Span(*match.span(number)) for number in range(1, len(words) + 1)]
