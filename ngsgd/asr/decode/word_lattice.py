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
        # acceptors have no output strings to delay
        arc = [labels[0], labels[1], labels[3], str(EPSILON)] if len(labels) > 1 else labels
        lines.append(" ".join([*arc, str(sum(map(float, weight.split(","))))]))
    kaldifst = _kaldifst()
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


def best_sequences(lattice: WordLattice, num: int) -> list[Scored]:
    """Return at most `num` word sequences, best first."""
    kaldifst = _kaldifst()
    text = [f"{arc.source} {arc.target} {arc.label} {arc.label} {arc.cost}" for arc in lattice.arcs]
    text += [f"{state} {cost}" for state, cost in lattice.finals.items()]
    # the first line defines the start, which has no arc if there are no words
    fst = kaldifst.compile("\n".join([*text, ""]))
    found = []
    for path in kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(fst, num)):
        _, labels, _, weight = kaldifst.get_linear_symbol_sequence(path)
        found.append(Scored(float(weight.value), tuple(labels)))
    return sorted(found)


def reweighted(lattice: WordLattice, cost: Callable[[Labels, int | None], float], order: int) -> WordLattice:
    """Add costs that depend on the last words.

    Args:
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
            arcs.append(WordArc(source, numbers[then], arc.label, arc.cost + cost(history, arc.label)))
    return _sorted(WordLattice(len(todo), tuple(arcs), finals))


def confidences(lattice: WordLattice, labels: Sequence[int]) -> list[float]:
    """Return the posterior probability of each word of a hypothesis at its position, 0 to 1.

    Word sequences are aligned with the hypothesis by expected edit distance (Xu, Povey, Mangu and
    Zhu 2011, "Minimum Bayes Risk decoding and system combination based on a recursion for edit
    distance"), as in lattice-to-ctm-conf of Kaldi. The hypothesis need not be the best one.
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
    """Distances after an arc, and the step that led to each.

    Steps: 0 skips the arc, 1 aligns its word with that of the hypothesis, 2 inserts a word.
    """
    if arc.label == EPSILON:
        return source_Q, [0] * len(source_Q)
    arc_Q, step_Q = [source_Q[0] + _UNALIGNED_COST], [0]
    for q, label in enumerate(labels, start=1):
        ways = (source_Q[q] + _UNALIGNED_COST, source_Q[q - 1] + (arc.label != label),
                arc_Q[q - 1] + _UNALIGNED_COST)
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
    arcs = tuple(arc._replace(source=number[state], target=number[arc.target])
                 for state in order for arc in leaving[state])
    finals = {number[state]: cost for state, cost in lattice.finals.items()}
    return WordLattice(len(order), arcs, finals)


def _leaving(lattice: WordLattice) -> list[list[WordArc]]:
    leaving: list[list[WordArc]] = [[] for _ in range(lattice.num_states)]
    for arc in lattice.arcs:
        leaving[arc.source].append(arc)
    return leaving


def _kaldifst() -> Any:
    return extras.load("kaldifst", extra="asr", purpose="Decoding")
