"""Weighted graphs of states that emit one class (pdf) per frame: denominators of objectives.

Entering a state takes one frame. Weights are log probabilities, but need not sum to one.
Letters: A arcs, S states, T frames.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.errors import DataError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NOTHING = -1  # Instead of a class, on an epsilon arc, which takes no frame.
# frames of the random paths whose average gives the occupancy of states (Kaldi: 100)
_AVERAGED_FRAMES = 100


class StateArc(NamedTuple):
    """Arc of a transducer: the class that it emits, or `NOTHING`."""

    source: int
    target: int
    pdf: int
    log_weight: float


@dataclass(frozen=True)
class StateGraph:
    """States, and the log weights of transitions between them."""

    pdf_S: Ints  # class that a state emits
    source_A: Ints
    target_A: Ints
    log_weight_A: Floats
    log_initial_S: Floats  # distribution of the state before the first frame
    log_final_S: Floats  # added at the end of a path
    # Leaky HMM: before every frame, a path may jump to a state distributed as `restart_S`, with
    # this weight.
    leak: float = 0.0
    restart_S: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def num_states(self) -> int:
        return len(self.pdf_S)

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return all fields as arrays, for storage."""
        return {"pdf": self.pdf_S, "source": self.source_A, "target": self.target_A, "log_weight": self.log_weight_A,
                "log_initial": self.log_initial_S, "log_final": self.log_final_S, "leak": np.array([self.leak]),
                "restart": self.restart_S}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> StateGraph:
        """Create a graph from the result of `arrays`."""
        pdf_S, source_A, target_A = (np.asarray(arrays[name], np.int64) for name in ("pdf", "source", "target"))
        log_weight_A, log_initial_S, log_final_S, leak, restart_S = (
            np.asarray(arrays[name], np.float64) for name in ("log_weight", "log_initial", "log_final", "leak", "restart"))
        return cls(pdf_S, source_A, target_A, log_weight_A, log_initial_S, log_final_S, float(leak[0]), restart_S)

    def with_leak(self, leak: float) -> StateGraph:
        """Return the graph with jumps of this weight (Kaldi's leaky-hmm-coefficient)."""
        return replace(self, leak=leak, restart_S=self.occupancy())

    def anywhere(self, *, with_start: bool = False) -> StateGraph:
        """Return the graph for chunks of sequences, which may begin and end in any state, and with
        `with_start` begin where sequences do, as the first chunk of each does.
        """
        initial_S = self.occupancy()
        if with_start:
            # as one more frame of the average
            initial_S = (_AVERAGED_FRAMES * initial_S + np.exp(self.log_initial_S)) / (_AVERAGED_FRAMES + 1)
        with np.errstate(divide="ignore"):
            return replace(self, log_initial_S=np.log(initial_S), log_final_S=np.zeros(self.num_states))

    def occupancy(self, num_frames: int = _AVERAGED_FRAMES) -> Floats:
        """Return the mean occupancy of states over random paths (Kaldi's initial probabilities)."""
        occupied_S = np.zeros(self.num_states)
        x_S = np.exp(self.log_initial_S)
        weight_A = np.exp(self.log_weight_A)
        for _ in range(num_frames):
            x_S = np.bincount(self.target_A, x_S[self.source_A] * weight_A, self.num_states)
            x_S = x_S / max(x_S.sum(), np.finfo(np.float64).tiny)
            occupied_S += x_S
        return np.asarray(occupied_S / occupied_S.sum())

    def log_weight_of(self, pdf_T: Sequence[int] | npt.NDArray[np.int32]) -> float:
        """Return the log weight of all paths that emit these classes, without jumps; -inf: none."""
        ids = [int(pdf) for pdf in pdf_T]
        x, total = np.exp(self.log_initial_S), 0.0
        before = NOTHING
        for pdf in ids:
            x = x @ self._between(before, pdf)
            norm = float(x.sum())
            if norm == 0.0:
                return -math.inf
            x, total, before = x / norm, total + math.log(norm), pdf
        final = float(x @ np.exp(self.log_final_S[self._states_of[before]]))
        return total + math.log(final) if final > 0.0 else -math.inf

    def best_path(self, pdf_T: Sequence[int] | npt.NDArray[np.int32]) -> Ints | None:
        """Return the states of the best path of these classes, without jumps; None without one."""
        ids = [int(pdf) for pdf in pdf_T]
        x, before, came_from = np.exp(self.log_initial_S), NOTHING, []
        for pdf in ids:
            weight = x[:, None] * self._between(before, pdf)
            if not weight.size or not weight.any():
                return None
            came_from.append(weight.argmax(axis=0))
            x, before = weight.max(axis=0), pdf
            x = x / x.max()
        x = x * np.exp(self.log_final_S[self._states_of[before]])
        if not x.any():
            return None
        at, path = int(x.argmax()), []
        for pdf, back in zip(ids[::-1], came_from[::-1], strict=True):
            path.append(self._states_of[pdf][at])
            at = int(back[at])
        return np.array(path[::-1], np.int64)

    def log_weight_into(self, state: int) -> float:
        """Return the log weight of beginning with a state, over all states before."""
        arrives_A = self.target_A == state
        return float(np.logaddexp.reduce(self.log_initial_S[self.source_A[arrives_A]] + self.log_weight_A[arrives_A],
                                         initial=-math.inf))

    def log_weight_between(self, source: int, target: int) -> float:
        """Return the log weight from one state to another; minus infinity without an arc."""
        return self._log_weights.get((source, target), -math.inf)

    @cached_property
    def _log_weights(self) -> dict[tuple[int, int], float]:
        found: dict[tuple[int, int], float] = {}
        for *ends, log_weight in zip(self.source_A.tolist(), self.target_A.tolist(), self.log_weight_A.tolist(), strict=True):
            key = (ends[0], ends[1])
            found[key] = float(np.logaddexp(found[key], log_weight)) if key in found else log_weight
        return found

    def _between(self, before: int, after: int) -> Floats:
        """Weights from the states of one class, or from all at the start, to those of another."""
        key = (before, after)
        if key not in self._blocks:
            rows, columns = self._states_of.get(before, np.zeros(0, np.int64)), self._states_of.get(after, np.zeros(0, np.int64))
            rows = np.arange(self.num_states) if before == NOTHING else rows
            place_S = np.full(self.num_states, NOTHING)
            place_S[columns] = np.arange(len(columns))
            from_S = np.full(self.num_states, NOTHING)
            from_S[rows] = np.arange(len(rows))
            block = np.zeros((len(rows), len(columns)))
            chosen = (from_S[self.source_A] >= 0) & (place_S[self.target_A] >= 0)
            np.add.at(block, (from_S[self.source_A[chosen]], place_S[self.target_A[chosen]]), np.exp(self.log_weight_A[chosen]))
            self._blocks[key] = block
        return self._blocks[key]

    @cached_property
    def _states_of(self) -> dict[int, Ints]:
        return {int(pdf): np.flatnonzero(self.pdf_S == pdf) for pdf in np.unique(self.pdf_S)}

    @cached_property
    def _blocks(self) -> dict[tuple[int, int], Floats]:
        return {}


def from_start(pdfs: Sequence[int], ends: Iterable[tuple[int, int]], log_weights: Iterable[float],
               log_final_S: Floats) -> StateGraph:
    """Return the graph of (source, target) of arcs whose paths begin in state 0, with any class."""
    ends_A = np.array(list(ends), np.int64).reshape(-1, 2)
    log_initial_S = np.full(len(pdfs), -math.inf)
    log_initial_S[0] = 0.0
    return StateGraph(np.array(pdfs, np.int64), ends_A[:, 0], ends_A[:, 1], np.array(list(log_weights)), log_initial_S, log_final_S)


def from_arcs(arcs: Iterable[StateArc], *, start: int, log_final: Mapping[int, float]) -> StateGraph:
    """Convert a transducer to a graph with the same sum over paths for any frame scores.

    States are split by the class of the incoming arcs. Epsilon arcs are summed into the arcs that
    follow; DataError for a cycle of them.
    """
    leaving: dict[int, list[StateArc]] = defaultdict(list)
    for arc in arcs:
        leaving[arc.source].append(arc)
    known: dict[int, dict[int, float]] = {}

    def reach(state: int, above: frozenset[int] = frozenset()) -> dict[int, float]:
        """State -> log weight through epsilon arcs, with the state itself."""
        if state in above:
            raise DataError("The graph has a cycle of epsilon arcs; remove it.")
        if state not in known:
            reached = {state: 0.0}
            for arc in leaving.get(state, ()):
                if arc.pdf == NOTHING:
                    for target, log_weight in reach(arc.target, above | {state}).items():
                        reached[target] = float(np.logaddexp(reached.get(target, -math.inf), arc.log_weight + log_weight))
            known[state] = reached
        return known[state]
    numbers = {(start, NOTHING): 0}
    todo = [(start, NOTHING)]
    found: dict[tuple[int, int], float] = {}
    log_finals: list[float] = []
    # The list grows during the iteration.
    for key in todo:
        final = -math.inf
        for state, log_weight in reach(key[0]).items():
            final = float(np.logaddexp(final, log_weight + log_final.get(state, -math.inf)))
            for arc in leaving.get(state, ()):
                if arc.pdf != NOTHING:
                    target = (arc.target, arc.pdf)
                    if target not in numbers:
                        numbers[target] = len(todo)
                        todo.append(target)
                    ends = numbers[key], numbers[target]
                    found[ends] = float(np.logaddexp(found.get(ends, -math.inf), log_weight + arc.log_weight))
        log_finals.append(final)
    return from_start([max(pdf, 0) for _, pdf in todo], found, found.values(), np.array(log_finals))
