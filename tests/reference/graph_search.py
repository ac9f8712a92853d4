"""The best word sequence under a lexicon and an n-gram model, by trying every one of them; for a
handful of words and frames.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ngsgd.asr.lang.topology import Topology


def best(topology: Topology, loglik_TP: npt.NDArray[np.float32], *, word_cost: Mapping[tuple[str, ...], float], silence_prob: float,
         max_words: int) -> tuple[float, tuple[str, ...]]:
    """(cost, words) of the cheapest sequence of at most `max_words`, and costs of allowed ones."""
    found = [(word_cost[words] + _acoustic(topology, loglik_TP, words, silence_prob), words)
             for length in range(max_words + 1) for words in itertools.product(topology.words, repeat=length) if words in word_cost]
    return min(found)


def _acoustic(topology: Topology, loglik_TP: npt.NDArray[np.float32], words: Sequence[str], silence_prob: float) -> float:
    """Of the best pronunciation and the best silences, in double precision."""
    silent, not_silent = (-math.log(silence_prob), -math.log(1 - silence_prob)) if silence_prob else (0.0, 0.0)
    costs = []
    for spelling in itertools.product(*(topology.lexicon[word] for word in words)):
        for gaps in itertools.product((False, True), repeat=len(words) + 1):
            pdfs = list(_states(topology, spelling, gaps))
            costs.append(sum(silent if gap else not_silent for gap in gaps) + _viterbi(loglik_TP.astype(np.float64), pdfs))
    return min(costs)


def _states(topology: Topology, spelling: Sequence[tuple[str, ...]], gaps: Sequence[bool]) -> Iterator[int]:
    for number, gap in enumerate(gaps):
        if gap:
            yield from topology.silence_pdfs
        if number < len(spelling):
            yield from topology.pdfs_of(spelling[number])


def _viterbi(loglik_TP: npt.NDArray[np.float64], pdfs: Sequence[int]) -> float:
    """Cost of the best way of spending at least a frame in each of these states, in this order."""
    if len(pdfs) > len(loglik_TP) or not pdfs:
        return math.inf
    cost = [math.inf] * len(pdfs)
    for t, loglik_P in enumerate(loglik_TP):
        before = cost
        cost = [min(before[s], before[s - 1] if s else (0.0 if t == 0 else math.inf)) - loglik_P[pdf] for s, pdf in enumerate(pdfs)]
    return cost[-1]
