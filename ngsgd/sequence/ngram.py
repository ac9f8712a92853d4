"""N-gram models of states and of units (phones): denominators of lattice-free MMI.

Tokens of `state_ngram` are classes with their repetitions merged; durations of classes have
separate geometric distributions. Counts are not smoothed, as in Kaldi's chain-est-phone-lm up to
its no-prune order. Unseen n-grams have no arc, and the leaky HMM lets paths jump (Povey et al.
2016, section 2). If a phone has three states, an order of 1 + 3 k covers k phones.

`unit_ngram` is an n-gram of units with HMM states, as in Kaldi's chain. A unit is left by any of
its states, entered in any of them, and never steps back. These probabilities are relative
frequencies, pooled over the contexts of a unit. Labels of every n-th frame therefore give a
topology for outputs at every n-th frame, whose units may omit states.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.errors import DataError
from ngsgd.sequence.graph import StateGraph

_START: tuple[int, ...] = ()
_END = (-1,)


def state_ngram(labels: Iterable[Sequence[int] | npt.NDArray[np.int32]], order: int) -> StateGraph:
    """Create the graph of an n-gram model of labelings, the classes of all frames of each sequence.

    Its states are histories of up to `order` - 1 different classes, the last of which is emitted.
    Probabilities of leaving a state, with that of ending, sum to one.
    """
    moves: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    num_frames: Counter[tuple[int, ...]] = Counter()
    for pdf_T in labels:
        history = _START
        ids = np.asarray(pdf_T)
        ends = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        for begin, end in pairwise(ends):
            if end > begin:
                following = (*history, int(ids[begin]))[-max(1, order - 1):]
                moves[history, following] += 1
                num_frames[following] += end - begin
                history = following
        moves[history, _END] += 1
    if not num_frames:
        raise DataError("There are no labels for an n-gram model; check the training data.")
    return _graph(moves, num_frames)


def _graph(moves: Counter[tuple[tuple[int, ...], tuple[int, ...]]], num_frames: Counter[tuple[int, ...]]) -> StateGraph:
    states = {history: number for number, history in enumerate([_START, *sorted(num_frames)])}
    left: Counter[tuple[int, ...]] = Counter()
    for (history, _), count in moves.items():
        left[history] += count
    ends, log_weights = [], []
    log_final_S = np.full(len(states), -math.inf)
    for (history, following), count in sorted(moves.items()):
        # The mean duration is frames / visits.
        leaves = left[history] / num_frames[history] if history else 1.0
        log_weight = math.log(leaves * count / left[history])
        if following == _END:
            log_final_S[states[history]] = log_weight
        else:
            ends.append((states[history], states[following]))
            log_weights.append(log_weight)
    for history, frames in sorted(num_frames.items()):
        if frames > left[history]:
            ends.append((states[history], states[history]))
            log_weights.append(math.log(1.0 - left[history] / frames))
    ends_A = np.array(ends, np.int64)
    log_initial_S = np.full(len(states), -math.inf)
    log_initial_S[0] = 0.0
    pdf_S = np.array([history[-1] if history else 0 for history in states], np.int64)
    return StateGraph(pdf_S, ends_A[:, 0], ends_A[:, 1], np.array(log_weights), log_initial_S, log_final_S)


# Units --------------------------------------------------------------------------------------------


Ints = npt.NDArray[np.int64]
History = tuple[int, ...]

# the unit before the first one of a sequence
EDGE = 0
_UNIT_END = -1

# (left neighbor or `EDGE`, unit, HMM state) -> class
ClassOf = Callable[[int, int, int], int]


class UnitFrames(NamedTuple):
    """The frames of a sequence: number of the unit's occurrence, the unit, and its HMM state."""

    occurrence_T: Ints
    # from 1
    unit_T: Ints
    # from 0
    state_T: Ints

    def every(self, step: int, first: int) -> UnitFrames:
        """Return every `step`-th frame, from `first`."""
        return UnitFrames(*(column_T[first::step] for column_T in self))


def unit_ngram(sequences: Iterable[UnitFrames], order: int, class_of: ClassOf) -> StateGraph:
    """Create the graph of an n-gram model of units.

    Its states are pairs of a history of units, the last of which is emitted, and an HMM state. A
    history has `order` - 1 units, but at least two, because classes depend on the left neighbor.
    Probabilities of leaving a state, with that of ending, sum to one. Raises DataError without
    frames.
    """
    counts = _Counts(max(2, order - 1))
    for one in sequences:
        if len(one.unit_T):
            counts.add(one)
    if not counts.moves:
        raise DataError("There are no labels for an n-gram model; check the training data.")
    return _Building(counts, class_of).graph()


class _Counts:
    """Counts of units after histories, and of HMM states within units."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.moves: dict[History, Counter[int]] = defaultdict(Counter)
        self.entered: dict[int, Counter[int]] = defaultdict(Counter)
        # (unit, state) -> following state, or `_UNIT_END` if the unit is left
        self.steps: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)

    def after(self, history: History, unit: int) -> History:
        return (*history, unit)[-self._length:]

    def add(self, one: UnitFrames) -> None:
        history: History = (EDGE,)
        begins_T = np.diff(one.occurrence_T, prepend=one.occurrence_T[0] - 1) != 0
        for at_I in np.split(np.arange(len(begins_T)), np.flatnonzero(begins_T)[1:]):
            unit, states = int(one.unit_T[at_I[0]]), one.state_T[at_I].tolist()
            self.moves[history].update([unit])
            self.entered[unit].update(states[:1])
            for before, after in pairwise([*states, _UNIT_END]):
                self.steps[unit, before].update([after])
            history = self.after(history, unit)
        self.moves[history].update([_UNIT_END])


class _Building:
    """The states of the graph in the order in which they are reached, and its arcs."""

    def __init__(self, counts: _Counts, class_of: ClassOf) -> None:
        self._counts = counts
        self._class_of = class_of
        # (history, HMM state); the first is the start, which emits nothing
        self._numbers: dict[tuple[History, int], int] = {((EDGE,), _UNIT_END): 0}
        self._todo = list(self._numbers)
        self._probability: dict[tuple[int, int], float] = defaultdict(float)
        self._final: dict[int, float] = {}

    def graph(self) -> StateGraph:
        # The list grows during the iteration.
        for history, state in self._todo:
            source = self._numbers[history, state]
            if state == _UNIT_END:
                self._leave(source, history, 1.0)
                continue
            for target, share in _shares(self._counts.steps[history[-1], state]):
                if target == _UNIT_END:
                    self._leave(source, history, share)
                else:
                    self._add(source, history, target, share)
        return self._finished()

    def _leave(self, source: int, history: History, probability: float) -> None:
        for unit, share in _shares(self._counts.moves[history]):
            if unit == _UNIT_END:
                self._final[source] = probability * share
                continue
            following = self._counts.after(history, unit)
            for state, entering in _shares(self._counts.entered[unit]):
                self._add(source, following, state, probability * share * entering)

    def _add(self, source: int, history: History, state: int, probability: float) -> None:
        key = (history, state)
        if key not in self._numbers:
            self._numbers[key] = len(self._todo)
            self._todo.append(key)
        # a unit that follows itself returns to its own states
        self._probability[source, self._numbers[key]] += probability

    def _finished(self) -> StateGraph:
        num_states = len(self._todo)
        log_initial_S, log_final_S = np.full((2, num_states), -math.inf)
        log_initial_S[0] = 0.0
        for state, probability in self._final.items():
            log_final_S[state] = math.log(probability)
        ends_A = np.array(list(self._probability), np.int64).reshape(-1, 2)
        # Nothing leads into the start, so its class is arbitrary.
        pdf_S = [0, *(self._class_of(history[-2], history[-1], state)
                      for history, state in self._todo[1:])]
        return StateGraph(np.array(pdf_S, np.int64), ends_A[:, 0], ends_A[:, 1],
                          np.log(list(self._probability.values())), log_initial_S, log_final_S)


def _shares(counts: Counter[int]) -> list[tuple[int, float]]:
    """Relative frequencies, sorted."""
    total = counts.total()
    return [(key, count / total) for key, count in sorted(counts.items())]
