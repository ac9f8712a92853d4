"""Recognized words with times and confidences, and the best distinct word sequences; T frames."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.asr.decode import decoding, scoring
from ngsgd.asr.decode import tuning as calibrations
from ngsgd.asr.decode.decoding import NO_PATH, Path, Scores, Search
from ngsgd.asr.decode.tuning import Calibration
from ngsgd.asr.lang import graphs, openfst
from ngsgd.asr.lang.graphs import EPSILON, Graph
from ngsgd.asr.lang.topology import Topology

# of a determinized lattice; with more states its beam is too wide
_MAX_STATES = 20_000
# an insertion or deletion costs slightly more than a substitution, so that alignments are unique
_UNALIGNED_COST = 1.0 + 1e-5

Labels = tuple[int, ...]


class WordArc(NamedTuple):
    """A word, as its number in the graph + 1, between two states."""

    source: int
    target: int
    label: int
    cost: float


class WordLattice(NamedTuple):
    """Arcs in topological order of their sources; state 0 is the start."""

    num_states: int
    arcs: tuple[WordArc, ...]
    finals: dict[int, float]  # final state -> cost


def determinized(lattice: Any) -> WordLattice | None:
    """Determinize a kaldifst.Lattice over words; None if it has too many states for its beam."""
    lines = []
    for line in lattice.to_str(show_weight_one=True, fst_field_separator=" ").splitlines():
        *labels, weight = line.split(" ")
        # acceptors have no output strings to delay
        arc = [labels[0], labels[1], labels[3], str(EPSILON)] if len(labels) > 1 else labels
        lines.append(" ".join([*arc, str(sum(map(float, weight.split(","))))]))
    kaldifst = openfst.toolkit()
    fst = kaldifst.compile("\n".join([*lines, ""]))
    try:
        kaldifst.determinize_star(fst, max_states=_MAX_STATES)
    except RuntimeError:
        return None
    arcs = tuple(WordArc(state, arc.nextstate, arc.ilabel, arc.weight.value)
                 for state in range(fst.num_states) for arc in kaldifst.ArcIterator(fst, state))
    costs = {state: float(fst.final(state).value) for state in range(fst.num_states)}
    finals = {state: cost for state, cost in costs.items() if cost != math.inf}
    return _sorted(WordLattice(fst.num_states, arcs, finals), fst.start)


def best_sequences(lattice: WordLattice, num: int) -> list[tuple[float, Labels]]:
    """Return at most `num` word sequences, each after the cost of its best path, best first."""
    kaldifst = openfst.toolkit()
    text = [f"{arc.source} {arc.target} {arc.label} {arc.label} {arc.cost}" for arc in lattice.arcs]
    text += [f"{state} {cost}" for state, cost in lattice.finals.items()]
    # the first line defines the start, which has no arc if there are no words
    fst = kaldifst.compile("\n".join([*text, ""]))
    found = []
    for path in kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(fst, num)):
        _, labels, _, weight = kaldifst.get_linear_symbol_sequence(path)
        found.append((float(weight.value), tuple(labels)))
    return sorted(found)


def reweighted(lattice: WordLattice, cost: Callable[[Labels, int | None], float], order: int) -> WordLattice:
    """Add costs that depend on the last words: `cost` of a label (None: the end) after a history of
    at most `order` - 1 labels, which become separate states.
    """
    leaving = _leaving(lattice)
    numbers: dict[tuple[int, Labels], int] = {(0, ()): 0}
    todo: list[tuple[int, Labels]] = [(0, ())]
    arcs, finals = [], {}
    for state, history in todo:
        source = numbers[state, history]
        if state in lattice.finals:
            finals[source] = lattice.finals[state] + cost(history, None)
        for arc in leaving[state]:
            then = (arc.target, (*history, arc.label)[-(order - 1) :] if order > 1 else ())
            if then not in numbers:
                numbers[then] = len(todo)
                todo.append(then)
            arcs.append(WordArc(source, numbers[then], arc.label, arc.cost + cost(history, arc.label)))
    return _sorted(WordLattice(len(todo), tuple(arcs), finals))


def confidences(lattice: WordLattice, labels: Sequence[int]) -> list[float]:
    """Return the posterior probability of each word of a hypothesis at its position, 0 to 1.

    Word sequences are aligned by expected edit distance (Xu, Povey, Mangu and Zhu 2011), as in
    lattice-to-ctm-conf of Kaldi. The hypothesis need not be the best one.
    """
    end, num_words = lattice.num_states, len(labels)
    incoming: list[list[WordArc]] = [[] for _ in range(end + 1)]
    # an arc without a word from each final state to the additional final state N
    ends = (WordArc(state, end, EPSILON, cost) for state, cost in lattice.finals.items())
    for arc in (*lattice.arcs, *ends):
        incoming[arc.target].append(arc)
    # expected edit distance of each state and prefix of the hypothesis
    distance_NQ = np.zeros((end + 1, num_words + 1))
    distance_NQ[0] = _UNALIGNED_COST * np.arange(num_words + 1)
    cost_N = [0.0] * (end + 1)
    # arcs with their share, the probability among all paths to their target, and the steps
    steps: list[list[tuple[WordArc, float, list[int]]]] = [[]]
    for state, arcs in enumerate(incoming[1:], start=1):
        costs = [cost_N[arc.source] + arc.cost for arc in arcs]
        least = min(costs)
        cost_N[state] = least - math.log(sum(math.exp(least - cost) for cost in costs))
        steps.append([])
        for arc, cost in zip(arcs, costs, strict=True):
            share = math.exp(cost_N[state] - cost)
            arc_Q, step_Q = _along(arc, labels, distance_NQ[arc.source].tolist())
            distance_NQ[state] += share * np.array(arc_Q)
            steps[-1].append((arc, share, step_Q))
    mass_NQ = np.zeros_like(distance_NQ)
    mass_NQ[-1, num_words] = 1.0
    confidence_Q = np.zeros(num_words)
    # the probability at the end of an arc goes to its source, and counts for equal words
    for state in range(end, 0, -1):
        for arc, share, step_Q in steps[state]:
            mass_Q = share * mass_NQ[state]
            for q in range(num_words, -1, -1):
                if step_Q[q] == 2:
                    mass_Q[q - 1] += mass_Q[q]
                elif step_Q[q] == 1:
                    mass_NQ[arc.source, q - 1] += mass_Q[q]
                    confidence_Q[q - 1] += mass_Q[q] * (arc.label == labels[q - 1])
                else:
                    mass_NQ[arc.source, q] += mass_Q[q]
    return [float(p) for p in np.clip(confidence_Q, 0.0, 1.0)]


def _along(arc: WordArc, labels: Sequence[int], source_Q: list[float]) -> tuple[list[float], list[int]]:
    """Distances after an arc, and steps: 0 skips it, 1 aligns its word, 2 inserts one."""
    if arc.label == EPSILON:
        return source_Q, [0] * len(source_Q)
    arc_Q, step_Q = [source_Q[0] + _UNALIGNED_COST], [0]
    for q, label in enumerate(labels, start=1):
        ways = (source_Q[q] + _UNALIGNED_COST, source_Q[q - 1] + (arc.label != label), arc_Q[q - 1] + _UNALIGNED_COST)
        step = min(range(3), key=ways.__getitem__)
        arc_Q.append(ways[step])
        step_Q.append(step)
    return arc_Q, step_Q


def _sorted(lattice: WordLattice, start: int = 0) -> WordLattice:
    """Order the states topologically from `start`, without unreachable states."""
    leaving = _leaving(lattice)
    num_incoming = [0] * lattice.num_states
    for arc in lattice.arcs:
        num_incoming[arc.target] += 1
    order = [start]
    for state in order:
        for arc in leaving[state]:
            num_incoming[arc.target] -= 1
            if not num_incoming[arc.target]:
                order.append(arc.target)
    number = {state: position for position, state in enumerate(order)}
    arcs = tuple(arc._replace(source=number[state], target=number[arc.target]) for state in order for arc in leaving[state])
    finals = {number[state]: cost for state, cost in lattice.finals.items()}
    return WordLattice(len(order), arcs, finals)


def _leaving(lattice: WordLattice) -> list[list[WordArc]]:
    leaving: list[list[WordArc]] = [[] for _ in range(lattice.num_states)]
    for arc in lattice.arcs:
        leaving[arc.source].append(arc)
    return leaving


_UNCALIBRATED = Calibration()


class Word(NamedTuple):
    """A recognized word; times in seconds from the first frame, without surrounding silence."""

    word: str
    start_s: float
    end_s: float
    confidence: float  # probability that the word was spoken at this position, 0 to 1


@dataclass(frozen=True)
class Hypothesis:
    """A word sequence; without words and with infinite cost if no path survived the beam."""

    words: tuple[Word, ...]
    cost: float
    is_complete: bool  # the path ends in a final state, not in the middle of a word


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
    topology, tied = graph.topology, graph.phone_states
    label_of = {word: label for label, word in enumerate(graph.words, start=1)}

    def converted(path: Path, frames: Sequence[int]) -> Hypothesis:
        pdf_T = path.pdf_T if tied is None else [tied[pdf] for pdf in path.pdf_T]
        spans = _spans_of_states(topology, path.words, pdf_T) if topology else None
        if spans is None:
            spans = list(itertools.pairwise([*frames, len(path.pdf_T)]))
        posteriors = confidences(lattice, [label_of[word] for word in path.words])
        timed = zip(path.words, spans, posteriors, strict=True)
        words = tuple(Word(word, start * frame_shift_s, end * frame_shift_s, calibration(posterior))
                      for word, (start, end), posterior in timed)
        return Hypothesis(words, path.cost, path.is_complete)
    found = [converted(best, frames)]
    # the best sequence is one of these, unless it was outside the beam of the lattice
    for _, labels in best_sequences(lattice, num_best) if num_best > 1 else ():
        names = tuple(graph.words[label - 1] for label in labels)
        if names != best.words and len(found) < num_best:
            path, frames = decoding.timed_path(graphs.within(graph, names), loglik_TP, search)
            # the beam of the search may have pruned it
            found += [converted(path, frames)] if path.words == names else []
    return found


def outcomes(hypotheses: Sequence[Hypothesis], texts: Sequence[Sequence[str]]) -> tuple[list[float], list[bool]]:
    """Return the confidence of every recognized word, and whether it is correct."""
    said = [[word.word for word in one.words] for one in hypotheses]
    rows = scoring.score(texts, said, [""] * len(said))[1]
    is_correct = [ref == hyp for row in rows for ref, hyp in row.pairs if hyp != scoring.NOTHING]
    return [word.confidence for one in hypotheses for word in one.words], is_correct


def calibrate(graph: Graph, logliks: Iterable[Scores], texts: Sequence[Sequence[str]], search: Search, *,
              lattice_beam: float) -> Calibration:
    """Fit the map from posteriors to the fraction of correct words (see `recognized`)."""
    found = [recognized(graph, one, search, lattice_beam=lattice_beam, frame_shift_s=1.0)[0] for one in logliks]
    return calibrations.fit(*outcomes(found, texts))


def lattice_of(graph: Graph, loglik_TP: Scores, search: Search, *, lattice_beam: float) -> WordLattice:
    """Return the word lattice; the beam is halved while there are too many word sequences."""
    raw = decoding.lattice(graph, loglik_TP, search, lattice_beam=lattice_beam)
    return determinized(raw) or lattice_of(graph, loglik_TP, search, lattice_beam=lattice_beam / 2)


def _spans_of_states(topology: Topology, words: Sequence[str],
                     pdf_T: Sequence[int] | npt.NDArray[np.int32]) -> list[tuple[int, int]] | None:
    """Return the frames [start, end) of each word; None if the states are not of the words."""

    def chars(pdfs: Iterable[int], suffix: str = "") -> str:
        # from a Unicode plane without special characters of patterns
        return "".join(f"{chr(0x10000 + pdf)}{suffix}" for pdf in pdfs)
    # a state is one character of a regular expression, and its frames are a run of it
    pattern = silence = f"[{chars(topology.silence_pdfs)}]*"
    for word in words:
        spellings = (chars(topology.pdfs_of(one), "+") for one in topology.lexicon.get(word, ()))
        pattern += f"({'|'.join(spellings)}){silence}"
    match = re.fullmatch(pattern, chars(pdf_T))
    return match and [match.span(number) for number in range(1, len(words) + 1)]
