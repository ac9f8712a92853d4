"""State-level lattices: paths in order of their cost, and posteriors of words.

A lattice is acyclic, and all paths to a state consume the same number of frames.  Costs are
negative log probabilities, the acoustic ones with their scale.

Letters: S states, A arcs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ngsgd.asr.lang.graphs import EPSILON, Arc


@dataclass(frozen=True)
class StateLattice:
    """Arcs (input pdf + 1, output word number + 1) in topological order of their source states."""

    start: int
    # the arcs that leave each state
    arcs_S: tuple[tuple[Arc, ...], ...]
    # state -> cost of ending there
    finals: dict[int, float]
    # states, sources before targets
    order: tuple[int, ...]
    # frames consumed on the way to each state
    frame_S: tuple[int, ...]


class LatticePath(NamedTuple):
    """A path from the start to a final state."""

    cost: float
    arcs: tuple[Arc, ...]


class WordPosterior(NamedTuple):
    """The expected number of paths that emit `label` after `frame` frames."""

    frame: int
    label: int
    posterior: float


def read(lattice: Any) -> StateLattice:
    """Convert a kaldifst.Lattice, whose arcs kaldifst gives only as text; costs have six digits."""
    arcs_S: list[list[Arc]] = [[] for _ in range(lattice.num_states)]
    finals = {}
    lines = lattice.to_str(show_weight_one=True, fst_field_separator=" ").splitlines()
    for line in lines:
        *labels, weight = line.split(" ")
        cost = sum(map(float, weight.split(",")))
        if len(labels) == 1:
            finals[int(labels[0])] = cost
        else:
            source, target, ilabel, olabel = map(int, labels)
            arcs_S[source].append(Arc(source, target, ilabel, olabel, cost))
    start = int(lines[0].split(" ")[0])
    order, frame_S = _sorted(start, arcs_S)
    return StateLattice(start, tuple(map(tuple, arcs_S)), finals, order, frame_S)


def best_paths(lattice: StateLattice, num: int) -> Iterator[LatticePath]:
    """The best paths of the `num` best distinct word sequences, best first.

    A* with the exact remaining cost: every (state, words so far) is expanded at most once.
    """
    rest_S = _costs_to_end(lattice, min)
    counter = itertools.count()
    # words so far are numbered: (number of all but the last, last) -> number
    histories: dict[tuple[int, int], int] = {}
    # (estimated total, tie break, cost so far, state or None after the end, words, arcs backwards)
    heap: list[tuple[float, int, float, int | None, int, Any]] = [
        (rest_S[lattice.start], next(counter), 0.0, lattice.start, 0, None)
    ]
    seen: set[tuple[int | None, int]] = set()
    while heap and num > 0:
        _, _, cost, state, words, back = heapq.heappop(heap)
        if (state, words) in seen:
            continue
        seen.add((state, words))
        if state is None:
            num -= 1
            yield LatticePath(cost, _unwound(back))
            continue
        if state in lattice.finals:
            total = cost + lattice.finals[state]
            heapq.heappush(heap, (total, next(counter), total, None, words, back))
        for arc in lattice.arcs_S[state]:
            then = (
                histories.setdefault((words, arc.output), len(histories) + 1)
                if arc.output
                else words
            )
            so_far = cost + arc.cost
            heapq.heappush(
                heap,
                (so_far + rest_S[arc.target], next(counter), so_far, arc.target, then, (arc, back)),
            )


def word_posteriors(lattice: StateLattice) -> list[WordPosterior]:
    """Every arc that emits a word with its posterior, from the forward-backward algorithm."""
    rest_S = _costs_to_end(lattice, _log_sum)
    from_start_S = _costs_from_start(lattice)
    total = rest_S[lattice.start]
    return [
        WordPosterior(
            lattice.frame_S[state],
            arc.output,
            math.exp(total - from_start_S[state] - arc.cost - rest_S[arc.target]),
        )
        for state in lattice.order
        for arc in lattice.arcs_S[state]
        if arc.output
    ]


def _sorted(start: int, arcs_S: Sequence[Sequence[Arc]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The states that can be reached in topological order, and the frame of every state."""
    frame_S = [0] * len(arcs_S)
    num_incoming_S = [0] * len(arcs_S)
    for arcs in arcs_S:
        for arc in arcs:
            num_incoming_S[arc.target] += 1
    order = [start]
    for state in order:
        for arc in arcs_S[state]:
            frame_S[arc.target] = frame_S[state] + (arc.input != EPSILON)
            num_incoming_S[arc.target] -= 1
            if not num_incoming_S[arc.target]:
                order.append(arc.target)
    return tuple(order), tuple(frame_S)


def _costs_to_end(lattice: StateLattice, total: Callable[[list[float]], float]) -> list[float]:
    """The cost of all ways from each state to an end, `total` of their costs."""
    cost_S = [math.inf] * len(lattice.arcs_S)
    for state in reversed(lattice.order):
        ways = [arc.cost + cost_S[arc.target] for arc in lattice.arcs_S[state]]
        cost_S[state] = total([*ways, lattice.finals.get(state, math.inf)])
    return cost_S


def _costs_from_start(lattice: StateLattice) -> list[float]:
    """The cost of all ways from the start to each state, added up as probabilities."""
    ways_S: list[list[float]] = [[] for _ in lattice.arcs_S]
    ways_S[lattice.start].append(0.0)
    cost_S = [math.inf] * len(lattice.arcs_S)
    for state in lattice.order:
        cost_S[state] = _log_sum(ways_S[state])
        for arc in lattice.arcs_S[state]:
            ways_S[arc.target].append(cost_S[state] + arc.cost)
    return cost_S


def _log_sum(costs: list[float]) -> float:
    """The cost of the sum of the probabilities."""
    least = min(costs)
    if least == math.inf:
        return math.inf
    return least - math.log(sum(math.exp(least - cost) for cost in costs))


def _unwound(back: Any) -> tuple[Arc, ...]:
    arcs = []
    while back is not None:
        arc, back = back
        arcs.append(arc)
    return tuple(reversed(arcs))
