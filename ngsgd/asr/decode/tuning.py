"""Choice of acoustic scale and word penalty, robust on small sets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ngsgd.word_errors import WordErrors

# weight of a neighbor on one axis relative to the setting; neighbors on both axes have its square
_NEIGHBOR_WEIGHT = 0.5


@dataclass(frozen=True)
class DecodingWeights:
    """The two weights of decoding that are tuned on validation speech."""

    acoustic_scale: float
    word_penalty: float


Sweep = tuple[tuple[DecodingWeights, WordErrors], ...]


def choose(sweep: Sweep) -> tuple[DecodingWeights, WordErrors]:
    """Return a robust setting among those that are about as good as the best one.

    1. Errors are smoothed over neighbors in the grid: a minimum between settings that are much
       worse is an accident of a small set.
    2. Settings within one standard error of the least smoothed errors are as good as the best (the
       one-standard-error rule of Breiman, Friedman, Olshen and Stone 1984). The standard error of a
       number of errors is its square root.
    3. Of these, those at the fewest edges of the grid: an edge often favors insertions or
       deletions, of which other speakers and noise make more.
    4. Of these, the least smoothed errors.
    5. Of equals, the least difference of insertions and deletions, and then the nearest to their
       center.
    """
    axes = (sorted({weights.acoustic_scale for weights, _ in sweep}), sorted({weights.word_penalty for weights, _ in sweep}))
    errors = {(axes[0].index(weights.acoustic_scale), axes[1].index(weights.word_penalty)): tried
              for weights, tried in sweep}
    smooth = {place: _smoothed(errors, place) for place in errors}
    least = min(smooth.values())
    good = [place for place in errors if smooth[place] <= least + math.sqrt(least) + 1e-9]

    def preference(place: tuple[int, int]) -> tuple[int, float, int]:
        # two values have no inside
        edges = sum(at in (0, len(axis) - 1) for at, axis in zip(place, axes, strict=True) if len(axis) > 2)
        # sums of halves and quarters over equal weights: equal up to rounding
        return edges, round(smooth[place], 9), abs(errors[place].insertions - errors[place].deletions)

    best = [place for place in good if preference(place) == min(map(preference, good))]
    center = [sum(place[axis] for place in best) / len(best) for axis in (0, 1)]
    chosen = min(best, key=lambda place: (sum((place[axis] - center[axis]) ** 2 for axis in (0, 1)), place))
    return DecodingWeights(axes[0][chosen[0]], axes[1][chosen[1]]), errors[chosen]


def _smoothed(errors: dict[tuple[int, int], WordErrors], place: tuple[int, int]) -> float:
    """Return the weighted mean of the errors of a setting and of its neighbors in the grid."""
    total = weights = 0.0
    for row in (-1, 0, 1):
        for column in (-1, 0, 1):
            near = errors.get((place[0] + row, place[1] + column))
            if near is not None:
                weight = _NEIGHBOR_WEIGHT ** (abs(row) + abs(column))
                total += weight * near.num_errors
                weights += weight
    return total / weights
