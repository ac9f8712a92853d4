"""Choice of acoustic scale and word penalty, robust on small sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ngsgd.asr.decode.scoring import WordErrors

# weight of a neighbor on one axis relative to the setting; neighbors on both axes have its square
_NEIGHBOR_WEIGHT = 0.5


@dataclass(frozen=True)
class DecodingWeights:
    """The two weights of decoding that are tuned on validation speech."""

    acoustic_scale: float
    word_penalty: float


Sweep = tuple[tuple[DecodingWeights, WordErrors], ...]


def choose(sweep: Sweep) -> tuple[DecodingWeights, WordErrors]:
    """Return the setting with the fewest errors after smoothing over its neighbors in the grid.

    A minimum between settings that are much worse is an accident of a small set. Among equals the
    setting with the most recognized words is chosen, because deletions grow faster than insertions
    beyond the edge of a flat region. After that the setting nearest to the center of the equals is
    chosen.

    Args:
        sweep: errors of every combination of some scales and some penalties.

    Returns:
        The weights and their errors.
    """
    scales = sorted({weights.acoustic_scale for weights, _ in sweep})
    penalties = sorted({weights.word_penalty for weights, _ in sweep})
    errors = {
        (scales.index(weights.acoustic_scale), penalties.index(weights.word_penalty)): tried
        for weights, tried in sweep
    }
    smooth = {place: _smoothed(errors, place) for place in errors}
    least = min(smooth.values())
    # smoothed counts are sums of halves and quarters over equal weights: equal up to rounding
    best = [place for place in errors if smooth[place] <= least + 1e-9]
    most = max(_num_recognized(errors[place]) for place in best)
    best = [place for place in best if _num_recognized(errors[place]) == most]
    chosen = min(best, key=lambda place: (_distance(place, best), place))
    return DecodingWeights(scales[chosen[0]], penalties[chosen[1]]), errors[chosen]


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


def _num_recognized(errors: WordErrors) -> int:
    return errors.num_words - errors.deletions + errors.insertions


def _distance(place: tuple[int, int], others: Sequence[tuple[int, int]]) -> float:
    """Squared distance to the mean of the others."""
    means = [sum(other[axis] for other in others) / len(others) for axis in (0, 1)]
    return sum((place[axis] - means[axis]) ** 2 for axis in (0, 1))
