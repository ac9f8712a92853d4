"""95% intervals of the difference between two systems, from several runs or from utterances."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from ngsgd.asr.decode.scoring import UtteranceErrors

_NUM_SAMPLES = 2000
# of the counts of all bootstrap samples
_MAX_COUNTS = 10**7
Bounds = tuple[float, float]


def paired_interval(differences: Sequence[float]) -> Bounds:
    """Bounds of the mean of paired differences by Student's t, such as of runs with equal seeds.

    >>> low, high = paired_interval([0.3, 0.3, 0.31])
    >>> round(low, 3), round(high, 3)
    (0.289, 0.318)
    """
    mean, count = statistics.fmean(differences), len(differences)
    reach = _quantile(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return mean - reach, mean + reach


def welch_interval(first: Sequence[float], second: Sequence[float]) -> Bounds:
    """Bounds of mean(second) - mean(first) of independent values by Welch's t."""
    value = statistics.fmean(second) - statistics.fmean(first)
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    weights = [part**2 / (len(one) - 1) for part, one in zip(parts, (first, second), strict=True)]
    # equal values have no variance, and any freedom
    freedom = sum(parts) ** 2 / sum(weights) if sum(weights) else 1.0
    reach = _quantile(freedom) * math.sqrt(sum(parts))
    return value - reach, value + reach


def bootstrap_interval(
    first: Sequence[UtteranceErrors], second: Sequence[UtteranceErrors]
) -> Bounds | None:
    """Bounds of WER(second) - WER(first) in percent points by a paired bootstrap; deterministic.

    Returns:
        None where the two are not of the same utterances.
    """
    if not first or [row.utt_id for row in first] != [row.utt_id for row in second]:
        return None
    count = len(first)
    pairs = zip(first, second, strict=True)
    more_U = np.array([b.errors.num_errors - a.errors.num_errors for a, b in pairs])
    words_U = np.array([row.errors.num_words for row in first])
    num_samples = max(200, min(_NUM_SAMPLES, _MAX_COUNTS // count))
    rng = np.random.default_rng(0)
    counts_SU = rng.multinomial(count, np.full(count, 1 / count), size=num_samples)
    wers_S = 100.0 * (counts_SU @ more_U) / np.maximum(counts_SU @ words_U, 1)
    low, high = np.percentile(wers_S, (2.5, 97.5))
    return float(low), float(high)


def _quantile(freedom: float) -> float:
    """Quantile of Student's t for a two-sided interval of 95%."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
