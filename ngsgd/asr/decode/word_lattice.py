"""Word lattices: one path for each word sequence, with the cost of its best alignment.

They are built from state-level lattices by determinization over words, as compact lattices of
Kaldi. Costs are negative log probabilities; acoustic costs are scaled.

Letters: Q words of a hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.asr import extras
from ngsgd.asr.lang.graphs import EPSILON

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
    # final state -> cost
    finals: dict[int, float]


class Scored(NamedTuple):
    """A word sequence and the cost of its best path."""

    cost: float
    labels: Labels


def determinized(lattice: Any) -> WordLattice | None:
    """Determinize a kaldifst.Lattice over words.

    Returns:
        The word lattice, or None if it has too many states; reduce the lattice beam then.
    """
    lines = []
    for line in lattice.to_str(show_weight_one=True, fst_field_separator=" ").splitlines():
        *labels, weight = line.split(" ")
        cost = sum(map(float, weight.split(",")))
        # acceptors have no output strings to delay
        lines.append(
            f"{labels[0]} {labels[1]} {labels[3]} {EPSILON} {cost}"
            if len(labels) > 1
            else f"{labels[0]} {cost}"
        )
    kaldifst = _kaldifst()
    fst = kaldifst.compile("\n".join([*lines, ""]))
    try:
        kaldifst.determinize_star(fst, max_states=_MAX_STATES)
    except RuntimeError:
        return None
    return _of_fst(fst)


def best_sequences(lattice: WordLattice, num: int) -> list[Scored]:
    """Return at most `num` word sequences, best first."""
    kaldifst = _kaldifst()
    paths = kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(_fst(lattice), num))
    found = []
    for path in paths:
        _, labels, _, weight = kaldifst.get_linear_symbol_sequence(path)
        found.append(Scored(float(weight.value), tuple(labels)))
    return sorted(found)


def reweighted(
    lattice: WordLattice, cost: Callable[[Labels, int | None], float], order: int
) -> WordLattice:
    """Add costs that depend on the last words.

    Args:
        lattice: a word lattice.
        cost: (history of at most `order` - 1 labels, label; None for the end) -> cost to add.
        order: order of the model behind `cost`; its histories become separate states.
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
            arcs.append(
                WordArc(source, numbers[then], arc.label, arc.cost + cost(history, arc.label))
            )
    return _sorted(WordLattice(len(todo), tuple(arcs), finals))


def confidences(lattice: WordLattice, labels: Sequence[int], scale: float = 1.0) -> list[float]:
    """Return the posterior probability of each word of a hypothesis at its position, 0 to 1.

    Word sequences are aligned with the hypothesis by expected edit distance (Xu, Povey, Mangu and
    Zhu 2011, "Minimum Bayes Risk decoding and system combination based on a recursion for edit
    distance"), as in lattice-to-ctm-conf of Kaldi.

    Args:
        lattice: a word lattice.
        labels: the hypothesis, which need not be the best.
        scale: factor of all costs before they become probabilities.
    """
    return _EditDistance(lattice, labels, scale).confidences()


class _EditDistance:
    """Recursions over one lattice and one hypothesis, with an additional final state N."""

    def __init__(self, lattice: WordLattice, labels: Sequence[int], scale: float) -> None:
        self._labels = labels
        end = lattice.num_states
        # an arc without a word from each final state to the end
        arcs = [
            *lattice.arcs,
            *(WordArc(state, end, EPSILON, cost) for state, cost in lattice.finals.items()),
        ]
        self._incoming: list[list[WordArc]] = [[] for _ in range(end + 1)]
        for arc in arcs:
            self._incoming[arc.target].append(arc)
        self._scale = scale

    def confidences(self) -> list[float]:
        num_words = len(self._labels)
        distance_NQ, steps = self._forward()
        mass_NQ = np.zeros_like(distance_NQ)
        mass_NQ[-1, num_words] = 1.0
        confidence_Q = np.zeros(num_words)
        for state in range(len(self._incoming) - 1, 0, -1):
            for arc, share, step_Q in steps[state]:
                mass_Q = share * mass_NQ[state]
                self._trace_back(arc, step_Q, mass_Q, mass_NQ, confidence_Q)
        return [float(p) for p in np.clip(confidence_Q, 0.0, 1.0)]

    def _forward(
        self,
    ) -> tuple[npt.NDArray[np.float64], list[list[tuple[WordArc, float, list[int]]]]]:
        """Expected edit distance of each state and prefix of the hypothesis; arcs with their share.

        The share of an arc is its probability among all paths to its target.
        """
        num_words = len(self._labels)
        distance_NQ = np.zeros((len(self._incoming), num_words + 1))
        distance_NQ[0] = _UNALIGNED_COST * np.arange(num_words + 1)
        cost_N = [0.0] * len(self._incoming)
        steps: list[list[tuple[WordArc, float, list[int]]]] = [[]]
        for state, arcs in enumerate(self._incoming[1:], start=1):
            costs = [cost_N[arc.source] + self._scale * arc.cost for arc in arcs]
            least = min(costs)
            cost_N[state] = least - math.log(sum(math.exp(least - cost) for cost in costs))
            steps.append([])
            for arc, cost in zip(arcs, costs, strict=True):
                share = math.exp(cost_N[state] - cost)
                arc_Q, step_Q = self._along(arc, distance_NQ[arc.source].tolist())
                distance_NQ[state] += share * np.array(arc_Q)
                steps[-1].append((arc, share, step_Q))
        return distance_NQ, steps

    def _along(self, arc: WordArc, source_Q: list[float]) -> tuple[list[float], list[int]]:
        """Distances after an arc, and the step that led to each.

        Steps: 0 skips the arc, 1 aligns the word of the arc with that of the hypothesis, 2 inserts
        a word.
        """
        if arc.label == EPSILON:
            return source_Q, [0] * len(source_Q)
        arc_Q, step_Q = [source_Q[0] + _UNALIGNED_COST], [0]
        for q, label in enumerate(self._labels, start=1):
            ways = (
                source_Q[q] + _UNALIGNED_COST,
                source_Q[q - 1] + (arc.label != label),
                arc_Q[q - 1] + _UNALIGNED_COST,
            )
            step = min(range(3), key=ways.__getitem__)
            arc_Q.append(ways[step])
            step_Q.append(step)
        return arc_Q, step_Q

    def _trace_back(
        self,
        arc: WordArc,
        step_Q: Sequence[int],
        mass_Q: npt.NDArray[np.float64],
        mass_NQ: npt.NDArray[np.float64],
        confidence_Q: npt.NDArray[np.float64],
    ) -> None:
        """Propagate the probability at the end of an arc to its source, and count equal words."""
        for q in range(len(step_Q) - 1, -1, -1):
            if step_Q[q] == 2:
                mass_Q[q - 1] += mass_Q[q]
            elif step_Q[q] == 1:
                mass_NQ[arc.source, q - 1] += mass_Q[q]
                confidence_Q[q - 1] += mass_Q[q] * (arc.label == self._labels[q - 1])
            else:
                mass_NQ[arc.source, q] += mass_Q[q]


def _of_fst(fst: Any) -> WordLattice:
    kaldifst = _kaldifst()
    arcs = [
        WordArc(state, arc.nextstate, arc.ilabel, arc.weight.value)
        for state in range(fst.num_states)
        for arc in kaldifst.ArcIterator(fst, state)
    ]
    costs = {state: float(fst.final(state).value) for state in range(fst.num_states)}
    finals = {state: cost for state, cost in costs.items() if cost != math.inf}
    return _sorted(WordLattice(fst.num_states, tuple(arcs), finals), fst.start)


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
    arcs = tuple(
        arc._replace(source=number[state], target=number[arc.target])
        for state in order
        for arc in leaving[state]
    )
    return WordLattice(
        len(order), arcs, {number[state]: cost for state, cost in lattice.finals.items()}
    )


def _leaving(lattice: WordLattice) -> list[list[WordArc]]:
    leaving: list[list[WordArc]] = [[] for _ in range(lattice.num_states)]
    for arc in lattice.arcs:
        leaving[arc.source].append(arc)
    return leaving


def _fst(lattice: WordLattice) -> Any:
    text = [f"{arc.source} {arc.target} {arc.label} {arc.label} {arc.cost}" for arc in lattice.arcs]
    text += [f"{state} {cost}" for state, cost in lattice.finals.items()]
    # the first line defines the start, which has no arc if there are no words
    return _kaldifst().compile("\n".join([*text, ""]))


def _kaldifst() -> Any:
    return extras.load("kaldifst", extra="asr", purpose="Decoding")
