"""Calibration of confidences: a monotone map from posteriors to the fraction of correct words.

Letters: N words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# minimum distance of posteriors from 0 and 1, which pruned lattices often return
_LEAST = 1e-3
_NUM_STEPS = 100


@dataclass(frozen=True)
class Calibration:
    """Logistic map, confidence = sigmoid(slope * logit(posterior) + offset).

    The default is the identity. Platt 1999, "Probabilistic outputs for support vector machines".
    """

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
    # fraction of correct words
    accuracy: float


def fit(posteriors: Sequence[float], is_correct: Sequence[bool]) -> Calibration:
    """Fit the map by maximum likelihood of the correctness of words.

    Targets are smoothed as by Platt, so that a set without errors gives a finite slope. With fewer
    than two words the result is the identity.
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


def reliability(confidences: Sequence[float], is_correct: Sequence[bool],
                num_bins: int = 10) -> list[ReliabilityBin]:
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
