"""The rule of the track. It was written before any run of the table.

Task: network, initial values by seed, data, minibatch of 256 frames and order of the frames are
fixed. An entry chooses optimizer, its settings, and the schedule of the learning rate.

Sweep, the same for all: learning rates with seed 0 at the length SWEEP_STEPS. It begins with the
rate of the entry, half and twice this rate. It moves by factors of 2 until the best rate has a
worse one on both sides, and then tries factors of sqrt(2) next to the best. It ends after
MAX_SWEEP_RUNS runs.

Lengths: an entry is trained for LENGTHS[k] minibatches with the best rate and seeds 1 to NUM_SEEDS,
with the schedule scaled to this length. A run always trains for its complete length and is
evaluated once, at its end, on all validation frames. The length counts if

    (target - mean) sqrt(n) >= 3.09 sigma

where mean and sigma are those of the n validation cross-entropies. Few seeds can agree by chance,
so sigma is at least that of the task. The result of an entry is the shortest length that counts.
The search begins at SWEEP_STEPS, moves by two lengths until one counts and one does not, and then
tries the length between them. A length whose first two seeds are worse than the target by the mean
is not continued: it does not count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

SWEEP_STEPS = 1600
MAX_SWEEP_RUNS = 7
# seeds of a length, and those after which a length may be given up
NUM_SEEDS, MIN_SEEDS = 4, 2
# standard errors by which the mean must be below the target: a probability of 0.001
Z = 3.09
# minibatches; neighbors differ by 10 %
LENGTHS = tuple(round(SWEEP_STEPS * 1.1 ** k) for k in range(-14, 13))
_MIDDLE = LENGTHS.index(SWEEP_STEPS)


def sigma_of(values: Sequence[float], least: float) -> float:
    """Standard deviation of the seeds, at least that of the task."""
    return max(statistics.stdev(values), least) if len(values) > 1 else least


def z_of(values: Sequence[float], target: float, least: float) -> float:
    """Standard errors by which the mean is below the target."""
    if not all(map(math.isfinite, values)):
        return -math.inf
    return (target - statistics.fmean(values)) * math.sqrt(len(values)) / sigma_of(values, least)


def p_value(z: float) -> float:
    """Probability of such a mean if the true one were equal to the target."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def sweep(rate: float, loss_at: Callable[[float], float], max_runs: int = MAX_SWEEP_RUNS) -> float:
    """Return the best learning rate; `loss_at` trains with a rate and returns its loss."""
    losses = {k: loss_at(rate * 2.0 ** k) for k in (-1.0, 0.0, 1.0)}

    def best() -> float:
        return min(losses, key=losses.__getitem__)

    while len(losses) < max_runs and best() in (min(losses), max(losses)):
        k = best() + (1.0 if best() == max(losses) else -1.0)
        losses[k] = loss_at(rate * 2.0 ** k)
    for k in (best() - 0.5, best() + 0.5):
        if len(losses) < max_runs:
            losses[k] = loss_at(rate * 2.0 ** k)
    return float(rate * 2.0 ** best())


def counts(loss_of: Callable[[int], float], target: float, least: float) -> bool:
    """Return whether a length counts; `loss_of` trains with a seed and returns its loss."""
    losses: list[float] = []
    for seed in range(1, NUM_SEEDS + 1):
        losses.append(loss_of(seed))
        if len(losses) == MIN_SEEDS and not statistics.fmean(losses) < target:
            return False
    return z_of(losses, target, least) >= Z


def shortest(counts: Callable[[int], bool]) -> int | None:
    """Return the shortest length that counts; None if the longest does not."""
    index = _MIDDLE
    if counts(LENGTHS[index]):
        while index >= 2 and counts(LENGTHS[index - 2]):
            index -= 2
        low = index - 1
    else:
        while not counts(LENGTHS[index]):
            if index + 2 >= len(LENGTHS):
                return None
            index += 2
        low = index - 1
    return LENGTHS[low] if low >= 0 and counts(LENGTHS[low]) else LENGTHS[index]
