"""Numerators with tolerance and n-gram models of units, written from their definitions; float64."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt

from ngsgd.sequence.graph import StateGraph
from tests.reference.path_sums import matrix

Array = npt.NDArray[np.float64]


def numerator(graph: StateGraph, labels: list[int], scores_TP: Array, tolerance: int) -> tuple[float, Array]:
    """(log sum, its gradient w.r.t. the scores), over all placements within the tolerance."""
    plain = matrix(StateGraph(graph.pdf_S, graph.source_A, graph.target_A, graph.log_weight_A,
                              graph.log_initial_S, graph.log_final_S))
    best = max((states for states in itertools.product(range(graph.num_states), repeat=len(labels))
                if graph.pdf_S[list(states)].tolist() == labels),
               key=lambda states: weight_of(graph, plain, states))
    if weight_of(graph, plain, best) == 0.0:
        return -np.inf, np.zeros_like(scores_TP)
    runs = [(state, len(list(group))) for state, group in itertools.groupby(best)]
    ends = np.cumsum([length for _, length in runs])
    frames, total, gradient = np.arange(len(labels)), 0.0, np.zeros_like(scores_TP)
    for place in itertools.product(range(len(runs)), repeat=len(labels)):
        steps = np.diff([-1, *place, len(runs)])
        # begins with the first state, ends with the last, omits none and does not step back
        if steps[0] != 1 or steps[-1] != 1 or not set(steps[1:-1].tolist()) <= {0, 1}:
            continue
        begins = ends - [length for _, length in runs]
        if any(not begins[k] - tolerance <= t < ends[k] + tolerance for t, k in enumerate(place)):
            continue
        states = tuple(runs[k][0] for k in place)
        pdf_T = graph.pdf_S[list(states)]
        p = weight_of(graph, plain, states) * np.exp(scores_TP[frames, pdf_T].sum())
        total += p
        gradient[frames, pdf_T] += p
    return float(np.log(total)), gradient / total


def weight_of(graph: StateGraph, plain: Array, states: tuple[int, ...]) -> float:
    """Weight of a sequence of states, without jumps."""
    weight = float(np.exp(graph.log_initial_S) @ plain[:, states[0]]) * float(np.exp(graph.log_final_S[states[-1]]))
    for before, after in itertools.pairwise(states):
        weight *= plain[before, after]
    return float(weight)


Frames = list[tuple[int, int, int]]


def probability(sequences: list[Frames], order: int, one: Frames) -> float:
    """Probability of (occurrence, unit, state) frames in the n-gram model of units."""
    move, enter, step = Counter[tuple[object, ...]](), Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for sequence in sequences:
        for history, unit in _moves(sequence, order):
            move[history, unit] += 1
        for unit, states in _units(sequence):
            enter[unit, states[0]] += 1
            step.update(((unit, before), after) for before, after in itertools.pairwise((*states, None)))
    found = 1.0
    for history, unit in _moves(one, order):
        found *= _share(move, history, unit)
    for unit, states in _units(one):
        found *= _share(enter, unit, states[0])
        for before, after in itertools.pairwise((*states, None)):
            found *= _share(step, (unit, before), after)
    return found


def _units(sequence: Frames) -> list[tuple[int, tuple[int, ...]]]:
    grouped = itertools.groupby(sequence, key=lambda frame: frame[:2])
    return [(unit, tuple(state for _, _, state in frames)) for (_, unit), frames in grouped]


def _moves(sequence: Frames, order: int) -> list[tuple[tuple[int, ...], int | None]]:
    units: list[int | None] = [0, *(unit for unit, _ in _units(sequence)), None]
    length = max(2, order - 1)
    return [(tuple(unit for unit in units[max(0, at - length):at] if unit is not None), units[at])
            for at in range(1, len(units))]


def _share(counts: Counter[tuple[object, ...]], given: object, value: object) -> float:
    total = sum(count for key, count in counts.items() if key[0] == given)
    return counts[given, value] / total if total else 0.0
