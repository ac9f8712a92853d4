"""Fits to the validation set: acoustic scale, word penalty, and calibration of confidences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

    Errors are smoothed over neighbors in the grid. Settings within one standard error (the square
    root) of the least are as good (the one-standard-error rule of Breiman et al. 1984). Of these:
    those at the fewest edges of the grid, the least smoothed errors, the least difference of
    insertions and deletions, and the nearest to their center.
    """
    axes = (sorted({weights.acoustic_scale for weights, _ in sweep}), sorted({weights.word_penalty for weights, _ in sweep}))
    errors = {(axes[0].index(weights.acoustic_scale), axes[1].index(weights.word_penalty)): tried for weights, tried in sweep}
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


# minimum distance of posteriors from 0 and 1, which pruned lattices often return
_LEAST = 1e-3
_NUM_STEPS = 100


@dataclass(frozen=True)
class Calibration:
    """confidence = sigmoid(slope * logit(posterior) + offset), Platt 1999; default: identity."""

    slope: float = 1.0
    offset: float = 0.0

    def __call__(self, posterior: float) -> float:
        """Return the confidence of a word, 0 to 1."""
        if self == Calibration():
            return posterior
        # a sigmoid that does not overflow
        return 0.5 * (1.0 + math.tanh(0.5 * (self.slope * _logit(posterior) + self.offset)))


class ReliabilityBin(NamedTuple):
    """Words with confidences in [low, high)."""

    low: float
    high: float
    num_words: int
    mean_confidence: float
    accuracy: float  # fraction of correct words


def fit(posteriors: Sequence[float], is_correct: Sequence[bool]) -> Calibration:
    """Fit the map by maximum likelihood of the correctness of words, with targets smoothed as by
    Platt. With fewer than two words the result is the identity.
    """
    if len(posteriors) < 2:
        return Calibration()
    correct_N = np.array(is_correct, np.float64)
    x_N2 = np.stack([np.array([_logit(p) for p in posteriors]), np.ones(len(posteriors))], axis=1)
    num_correct, num_wrong = correct_N.sum(), (1.0 - correct_N).sum()
    positive, negative = (num_correct + 1.0) / (num_correct + 2.0), 1.0 / (num_wrong + 2.0)
    target_N = np.where(correct_N > 0.0, positive, negative)
    prior_2 = np.array([1.0, 0.0])

    def loss(weight_2: npt.NDArray[np.float64]) -> float:
        z_N = x_N2 @ weight_2
        # a prior of unit variance around the identity
        return float((np.logaddexp(0.0, z_N) - target_N * z_N).sum() + 0.5 * ((weight_2 - prior_2) ** 2).sum())
    weight_2 = prior_2
    for _ in range(_NUM_STEPS):
        p_N = 0.5 * (1.0 + np.tanh(0.5 * (x_N2 @ weight_2)))
        gradient_2 = x_N2.T @ (p_N - target_N) + (weight_2 - prior_2)
        hessian_22 = (x_N2 * (p_N * (1.0 - p_N))[:, None]).T @ x_N2 + np.eye(2)
        step_2 = np.linalg.solve(hessian_22, gradient_2)
        # the Newton step is too long if all words are certain
        while np.abs(step_2).max() > 1e-9 and loss(weight_2 - step_2) > loss(weight_2):
            step_2 = step_2 / 2
        weight_2 = weight_2 - step_2
        if np.abs(step_2).max() < 1e-9:
            break
    # a decreasing map would order the words wrongly
    return Calibration(max(0.0, float(weight_2[0])), float(weight_2[1]))


def reliability(confidences: Sequence[float], is_correct: Sequence[bool], num_bins: int = 10) -> list[ReliabilityBin]:
    """Group words by their confidence; empty groups are omitted."""
    confidence_N, correct_N = np.array(confidences, np.float64), np.array(is_correct, np.float64)
    bin_N = np.minimum((confidence_N * num_bins).astype(int), num_bins - 1)
    found = []
    for k in np.unique(bin_N).tolist():
        mine_N = bin_N == k
        means = float(confidence_N[mine_N].mean()), float(correct_N[mine_N].mean())
        found.append(ReliabilityBin(k / num_bins, (k + 1) / num_bins, int(mine_N.sum()), *means))
    return found


def expected_calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """Mean difference between confidence and accuracy, weighted by words; 0 is best."""
    total = sum(one.num_words for one in bins)
    wrong = sum(one.num_words * abs(one.mean_confidence - one.accuracy) for one in bins)
    return wrong / max(total, 1)


def _logit(posterior: float) -> float:
    p = min(max(posterior, _LEAST), 1.0 - _LEAST)
    return math.log(p / (1.0 - p))
