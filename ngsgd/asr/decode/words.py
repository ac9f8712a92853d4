"""Recognized words with times and confidences, and the best distinct word sequences.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.asr import extras
from ngsgd.asr.decode import state_lattice
from ngsgd.asr.decode.state_lattice import LatticePath, WordPosterior
from ngsgd.asr.decode.streaming import Search
from ngsgd.asr.lang.graphs import Arc, Graph
from ngsgd.asr.lang.topology import Topology


class Word(NamedTuple):
    """A recognized word; times in seconds from the first frame, silence around it excluded."""

    word: str
    start_s: float
    end_s: float
    # posterior probability of the word at its place, 0 to 1
    confidence: float


@dataclass(frozen=True)
class Hypothesis:
    """A word sequence; without words and with infinite cost if no path survived the beam."""

    words: tuple[Word, ...]
    cost: float
    # the path ends where an utterance may end, not in the middle of a word
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
) -> list[Hypothesis]:
    """Decode one utterance into its best word sequences.

    Posteriors are those of the lattice at the acoustic scale of the search, language model costs
    with a scale of 1, as in Kaldi's lattice-to-ctm-conf with acoustic scale 1/LMWT.

    Args:
        graph: What is searched.  With `graph.topology` words start and end where their states do.
            Without it (tied states) a word starts where the graph emits it and ends at the next.
        loglik_TP: Log posterior minus log prior of each pdf.
        search: Acoustic scale and beam.
        lattice_beam: Paths whose cost is higher than the best one's by more than this do not count
            (nats; typical 8).
        frame_shift_s: Seconds per frame, 0.01 for all features of this package.
        num_best: Number of distinct word sequences.

    Returns:
        At most `num_best` hypotheses, best first, and at least one.
    """
    # first: kaldi_decoder takes its graphs
    extras.load("kaldifst", extra="asr", purpose="Decoding")
    kaldi_decoder = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=search.beam, lattice_beam=lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph.fst, config)
    scaled_TP = np.ascontiguousarray(search.acoustic_scale * loglik_TP, dtype=np.float32)
    if not len(loglik_TP) or not decoder.decode(kaldi_decoder.DecodableCtc(scaled_TP)):
        return [Hypothesis((), math.inf, is_complete=False)]
    lattice = state_lattice.read(decoder.get_raw_lattice()[1])
    posteriors = state_lattice.word_posteriors(lattice)
    is_complete = math.isfinite(decoder.final_relative_cost())
    return [
        Hypothesis(_words(graph, path, posteriors, frame_shift_s), path.cost, is_complete)
        for path in state_lattice.best_paths(lattice, num_best)
    ]


def _words(
    graph: Graph, path: LatticePath, posteriors: Sequence[WordPosterior], frame_shift_s: float
) -> tuple[Word, ...]:
    """The words of a path, with their times and confidences."""
    labels, frames, pdfs = _emissions(path.arcs)
    names = [graph.words[label - 1] for label in labels]
    spans = (
        _spans_of_states(graph.topology, names, pdfs) if graph.topology else None
    ) or _spans_of_emissions(frames, len(pdfs))
    found = []
    for number, (label, name, span) in enumerate(zip(labels, names, spans, strict=True)):
        place = _place(spans, frames, number, len(pdfs))
        confidence = sum(
            one.posterior
            for one in posteriors
            if one.label == label and place.start <= one.frame < place.end
        )
        # an alternative may emit the word twice at one place
        found.append(
            Word(name, span.start * frame_shift_s, span.end * frame_shift_s, min(confidence, 1.0))
        )
    return tuple(found)


def _emissions(arcs: Sequence[Arc]) -> tuple[list[int], list[int], list[int]]:
    """The word labels of a path, the frames before each of them, and the pdf of every frame."""
    labels: list[int] = []
    frames: list[int] = []
    pdfs: list[int] = []
    for arc in arcs:
        if arc.output:
            labels.append(arc.output)
            frames.append(len(pdfs))
        if arc.input:
            pdfs.append(arc.input - 1)
    return labels, frames, pdfs


def _spans_of_states(
    topology: Topology, words: Sequence[str], pdfs: Sequence[int]
) -> list[Span] | None:
    """The frames of each word, its states matched with its pronunciations; None if they differ."""
    # a state is one character, a run of it any number of frames
    silence = f"[{''.join(map(_char, topology.silence_pdfs))}]*"
    pattern = silence + silence.join(f"({_spellings(topology, word)})" for word in words) + silence
    match = re.fullmatch(pattern, "".join(map(_char, pdfs)))
    return match and [Span(*match.span(number)) for number in range(1, len(words) + 1)]


def _spellings(topology: Topology, word: str) -> str:
    pronunciations = topology.lexicon.get(word, ())
    return "|".join(
        "".join(f"{_char(pdf)}+" for pdf in topology.pdfs_of(phones)) for phones in pronunciations
    )


def _char(pdf: int) -> str:
    # of a plane without characters that mean something in a pattern
    return chr(0x10000 + pdf)


def _spans_of_emissions(frames: Sequence[int], num_frames: int) -> list[Span]:
    return [Span(start, end) for start, end in itertools.pairwise([*frames, num_frames])]


def _place(spans: Sequence[Span], frames: Sequence[int], number: int, num_frames: int) -> Span:
    """The frames at which an emission of the same word counts as this word.

    Half of the word's duration around it, and nearer to its emission than to another word's.
    """
    start, end = spans[number]
    margin = (end - start + 1) // 2
    before = (frames[number - 1] + frames[number] + 1) // 2 if number else 0
    after = (
        (frames[number] + frames[number + 1] + 1) // 2
        if number + 1 < len(frames)
        else num_frames + 1
    )
    return Span(max(start - margin, before), min(end + margin + 1, after))
