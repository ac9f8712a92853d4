"""N-gram models of states and of units (phones): denominators of lattice-free MMI.

Counts are not smoothed, as in Kaldi's chain-est-phone-lm up to its no-prune order. Unseen n-grams
have no arc, and the leaky HMM lets paths jump (Povey et al. 2016, section 2). Tokens of
`state_ngram` are classes with their repetitions merged and geometric durations: if a phone has
three states, an order of 1 + 3 k covers k phones. A unit of `unit_ngram` is left by any of its
states, entered in any, and never steps back, by frequencies pooled over its contexts. Labels of
every n-th frame therefore give a topology for outputs at every n-th frame.
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
from ngsgd.sequence.graph import StateGraph, from_start

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
    return from_start([history[-1] if history else 0 for history in states], ends, log_weights, log_final_S)


Ints = npt.NDArray[np.int64]
History = tuple[int, ...]

EDGE = 0  # the unit before the first one of a sequence
_UNIT_END = -1

ClassOf = Callable[[int, int, int], int]  # (left neighbor or `EDGE`, unit, HMM state) -> class


class UnitFrames(NamedTuple):
    """The frames of a sequence: number of the unit's occurrence, the unit, and its HMM state."""

    occurrence_T: Ints
    unit_T: Ints  # from 1
    state_T: Ints  # from 0

    def every(self, step: int, first: int) -> UnitFrames:
        """Return every `step`-th frame, from `first`."""
        return UnitFrames(*(column_T[first::step] for column_T in self))


def unit_ngram(sequences: Iterable[UnitFrames], order: int, class_of: ClassOf) -> StateGraph:
    """Create the graph of an n-gram model of units; DataError without frames.

    Its states are pairs of a history of `order` - 1 units, at least two (classes depend on the left
    neighbor), and an HMM state. Probabilities of leaving a state, with ending, sum to one.
    """
    # counts of units after histories, and of HMM states within units
    length = max(2, order - 1)
    moves: dict[History, Counter[int]] = defaultdict(Counter)
    entered: dict[int, Counter[int]] = defaultdict(Counter)
    # (unit, state) -> following state, or `_UNIT_END` if the unit is left
    steps: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for one in sequences:
        if len(one.unit_T):
            history: History = (EDGE,)
            begins_T = np.diff(one.occurrence_T, prepend=one.occurrence_T[0] - 1) != 0
            for at_I in np.split(np.arange(len(begins_T)), np.flatnonzero(begins_T)[1:]):
                unit, states = int(one.unit_T[at_I[0]]), one.state_T[at_I].tolist()
                moves[history].update([unit])
                entered[unit].update(states[:1])
                for before, after in pairwise([*states, _UNIT_END]):
                    steps[unit, before].update([after])
                history = (*history, unit)[-length:]
            moves[history].update([_UNIT_END])
    if not moves:
        raise DataError("There are no labels for an n-gram model; check the training data.")
    # (history, HMM state) in the order in which they are reached; the first is the start, which
    # emits nothing
    numbers: dict[tuple[History, int], int] = {((EDGE,), _UNIT_END): 0}
    todo = list(numbers)
    probabilities: dict[tuple[int, int], float] = defaultdict(float)
    final: dict[int, float] = {}

    def add(source: int, key: tuple[History, int], probability: float) -> None:
        if key not in numbers:
            numbers[key] = len(todo)
            todo.append(key)
        # a unit that follows itself returns to its own states
        probabilities[source, numbers[key]] += probability
    # The list grows during the iteration.
    for history, state in todo:
        source = numbers[history, state]
        at_start = state == _UNIT_END
        for target, share in [(_UNIT_END, 1.0)] if at_start else _shares(steps[history[-1], state]):
            if target != _UNIT_END:
                add(source, (history, target), share)
                continue
            for unit, share_of_unit in _shares(moves[history]):
                if unit == _UNIT_END:
                    final[source] = share * share_of_unit
                    continue
                for first, entering in _shares(entered[unit]):
                    add(source, ((*history, unit)[-length:], first), share * share_of_unit * entering)
    log_final_S = np.full(len(todo), -math.inf)
    for number, probability in final.items():
        log_final_S[number] = math.log(probability)
    pdfs = [0, *(class_of(history[-2], history[-1], state) for history, state in todo[1:])]
    return from_start(pdfs, probabilities, np.log(list(probabilities.values())), log_final_S)


def _shares(counts: Counter[int]) -> list[tuple[int, float]]:
    total = counts.total()
    return [(key, count / total) for key, count in sorted(counts.items())]
