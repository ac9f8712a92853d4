"""N-gram model of the states of labelings: the denominator of lattice-free MMI.

Tokens are classes with their repetitions merged; durations of classes have separate geometric
distributions. Counts are not smoothed, as in Kaldi's chain-est-phone-lm up to its no-prune order.
Unseen n-grams have no arc, and the leaky HMM lets paths jump (Povey et al. 2016, section 2). If a
phone has three states, an order of 1 + 3 k covers k phones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ngsgd.errors import DataError
from ngsgd.sequence.graph import StateGraph

_START: tuple[int, ...] = ()
_END = (-1,)


def state_ngram(labels: Iterable[Sequence[int] | npt.NDArray[np.int32]], order: int) -> StateGraph:
    """Create the graph of an n-gram model of labelings.

    Its states are histories of up to `order` - 1 different classes, the last of which is emitted.
    Probabilities of leaving a state, with that of ending, sum to one.

    Args:
        labels: class of every frame, for each sequence.
        order: n.
    """
    moves: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    num_frames: Counter[tuple[int, ...]] = Counter()
    for pdf_T in labels:
        history = _START
        for run, length in _runs(pdf_T):
            following = (*history, run)[-max(1, order - 1):]
            moves[history, following] += 1
            num_frames[following] += length
            history = following
        moves[history, _END] += 1
    if not num_frames:
        raise DataError("There are no labels for an n-gram model; check the training data.")
    return _graph(moves, num_frames)


def _runs(pdf_T: Sequence[int] | npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return (class, number of repetitions)."""
    ids = np.asarray(pdf_T)
    ends = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    return [(int(ids[begin]), end - begin) for begin, end in pairwise(ends) if end > begin]


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
