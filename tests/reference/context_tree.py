"""Decision trees by trying every split of every leaf, with explicit loops in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ngsgd.asr.align.tree_building import VARIANCE_FLOOR, ContextStats

Rows = list[int]


def log_likelihood(stats: ContextStats, rows: Iterable[int]) -> float:
    """Of the frames of these contexts under one diagonal Gaussian."""
    rows = list(rows)
    count = float(sum(stats.count_N[row] for row in rows))
    if not count:
        return 0.0
    mean = sum(stats.sum_ND[row] for row in rows) / count
    variance = np.maximum(sum(stats.square_ND[row] for row in rows) / count - mean**2, VARIANCE_FLOOR)
    return -0.5 * count * sum(math.log(2 * math.pi * v) + 1.0 for v in variance)


def grow(stats: ContextStats, questions: Sequence[frozenset[int]], *, num_phones: int,
         num_leaves: int, min_count: float,
         keys: Sequence[int] = (0, 2)) -> Callable[[Sequence[int], int], object]:
    """The leaf of (window, state), any hashable thing."""
    contexts = stats.context_N4.tolist()
    leaves: list[Rows] = [
        [row for row, (_, center, _, of) in enumerate(contexts) if (center, of) == (phone, state)]
        for phone in range(2, num_phones + 1) for state in range(3)
    ]
    # two states of silence are leaves as well
    while len(leaves) + 2 < num_leaves:
        best = None
        for at, rows in enumerate(leaves):
            for key, question in itertools.product(keys, questions):
                yes = [row for row in rows if contexts[row][key] in question]
                no = [row for row in rows if contexts[row][key] not in question]
                if min(stats.count_N[yes].sum(), stats.count_N[no].sum()) < min_count:
                    continue
                gain = (log_likelihood(stats, yes) + log_likelihood(stats, no)
                        - log_likelihood(stats, rows))
                if best is None or gain > best[0]:
                    best = gain, at, yes, no
        assert best is not None
        leaves[best[1] : best[1] + 1] = [best[2], best[3]]
    leaf_of = {tuple(contexts[row]): at for at, rows in enumerate(leaves) for row in rows}
    return lambda window, state: leaf_of[(*window, state)]


def clusters(stats: ContextStats, num_phones: int) -> list[frozenset[int]]:
    """Phones, then every merged pair of the least loss, by the middle state (any of silence)."""
    contexts = stats.context_N4.tolist()
    rows = {phone: [row for row, (_, center, _, state) in enumerate(contexts)
                    if center == phone and (state == 1 or phone == 1)]
            for phone in range(1, num_phones + 1)}
    current = [frozenset({phone}) for phone in rows]
    found = list(current)
    while len(current) > 2:
        def loss(pair: tuple[frozenset[int], frozenset[int]]) -> float:
            of = [[row for phone in members for row in rows[phone]] for members in pair]
            return (log_likelihood(stats, of[0]) + log_likelihood(stats, of[1])
                    - log_likelihood(stats, of[0] + of[1]))

        one, other = min(itertools.combinations(current, 2), key=loss)
        current = [c for c in current if c not in (one, other)] + [one | other]
        found.append(one | other)
    return found
