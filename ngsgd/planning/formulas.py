"""Formulas for the duration of an outer iteration on N workers, the cost of failures, and job size.

They use no clock and no files; `ngsgd.planning.probe` measures the inputs.
Letters:

    N jobs (one per worker)             K samples (frames) of a job
    r samples per second of one worker  P bytes of the model
    B bytes per second of a link        L seconds of latency
    M bytes per second added to a mean  f seconds of a job that are independent of K
    sigma log-normal spread of job time z_N normal score
    lam failures per second and worker  R seconds until a lost worker is replaced

z_N is the approximation of Blom (1958). docs/planner.md has the derivations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# minimum per job: the Fisher estimates are updated at each of the first ten, and converge in them
MIN_MINIBATCHES = 10
# outer iterations, in units of the time constant 1 / (1 - eta) of the outer momentum
_FILL = 5.0
# with fewer outer iterations a run is little more than one average of independent models
MIN_OUTER_ITERS = 20

_NORMAL = statistics.NormalDist()


# Computing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the logarithm of the job time, in two parts."""

    # between workers, permanent: another processor, a busy neighbor
    host: float
    # of one minibatch; it averages out over a job
    step: float

    def of_job(self, num_minibatches: float) -> float:
        """sigma of a job of that many minibatches."""
        return math.sqrt(self.host ** 2 + self.step ** 2 / max(num_minibatches, 1.0))


def normal_score(count: int) -> float:
    """z_N: approximate expected maximum of `count` standard normal numbers (Blom)."""
    return _NORMAL.inv_cdf((count - 0.375) / (count + 0.25))


def straggler_factor(sigma: float, count: int) -> float:
    """The slowest of `count` log-normal times over their mean: factor of synchronous rounds.

    For N >= 4 its error is less than 0.3 % for sigma up to 0.1, 0.7 % up to 0.2, 3.3 % up to 0.4.
    Rounds of fixed duration have no such factor.
    """
    # for one worker the formula gives the median, which is below the mean
    return max(1.0, math.exp(sigma * normal_score(count) - sigma ** 2 / 2))


def split_spread(seconds: Sequence[Sequence[float]], num_minibatches: float) -> Spread:
    """Estimate both parts of the spread from job times of `num_minibatches` each.

    Effects common to a round (the machine was busy for a while) cause no waiting and are removed.
    This is an analysis of variance without interaction; negative parts are set to zero. With one
    worker or one round the result is zero.

    Args:
        seconds: job times, one row per round, one column per worker.
        num_minibatches: minibatches per job.
    """
    num_rounds, num_workers = len(seconds), min(map(len, seconds), default=0)
    if num_rounds < 2 or num_workers < 2:
        return Spread(0.0, 0.0)
    logs = [[math.log(value) for value in row] for row in seconds]
    free_of_round = [[value - statistics.fmean(row) for value in row] for row in logs]
    means = [statistics.fmean(column) for column in zip(*free_of_round, strict=True)]
    squares = [(value - mean) ** 2 for row in free_of_round for value, mean in zip(row, means, strict=True)]
    residual = sum(squares) / ((num_rounds - 1) * (num_workers - 1))
    between = statistics.variance(means)
    return Spread(math.sqrt(max(0.0, between - residual / num_rounds)), math.sqrt(residual * num_minibatches))


# Averaging and failures ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The link between the coordinator and a worker."""

    # B, bytes per second and direction
    bandwidth: float
    latency_s: float   # L
    # M, bytes of parameters added to a mean per second; 8e9 is a typical memory
    add_speed: float


def central_s(num_jobs: int, num_bytes: float, link: Link) -> float:
    """One node receives N models, adds them and sends N copies, all through its link."""
    return travel_time_s(num_jobs, num_bytes, link) + num_jobs * num_bytes / link.add_speed


def travel_time_s(num_jobs: int, num_bytes: float, link: Link, *, num_machines: int | None = None,
                  compression: float = 1.0) -> float:
    """One node sends the model to each machine (default: one per job) and receives N results of
    P / c bytes.
    """
    num_models = num_jobs if num_machines is None else min(num_jobs, num_machines)
    return 2 * link.latency_s + num_bytes * (num_models + num_jobs / compression) / link.bandwidth


def retry_wait_s(rate: float, num_jobs: int, compute_s: float, replace_s: float) -> float:
    """Mean extra time of an outer iteration if lost jobs run again within it and all others wait.

    There are m = N lam C failures per outer iteration, uniform over its C seconds, and the last one
    determines the delay: C (1 - (1 - exp(-m)) / m) + R (1 - exp(-m)), at most C + R. A second
    failure of the same job is neglected, so lam C should be below 0.1.
    """
    expected = num_jobs * rate * compute_s
    if expected == 0.0:
        return 0.0
    any_failure = -math.expm1(-expected)
    return compute_s * (1.0 - any_failure / expected) + replace_s * any_failure


# Samples of a job ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleBounds:
    """Reasonable range of K."""

    low: float    # ten minibatches
    # at least `MIN_OUTER_ITERS`, and enough for the outer momentum to converge
    high: float

    @classmethod
    def of(cls, *, minibatch_size: int, total_samples: float, num_jobs: int, outer_momentum: float) -> SampleBounds:
        """`total_samples` are those of the complete run, over all jobs."""
        outer_iters = max(MIN_OUTER_ITERS, _FILL / (1.0 - outer_momentum))
        return cls(float(MIN_MINIBATCHES * minibatch_size), total_samples / (num_jobs * outer_iters))


@dataclass(frozen=True)
class SampleAdvice:
    """A value for egs.samples_per_iter, and the reason."""

    samples: int
    reason: str
    # False: no value is suitable
    enough_data: bool = True


def recommend_samples(*, now: float, rate: float, overhead_s: float, bounds: SampleBounds,
                      max_overhead: float = 0.1) -> SampleAdvice:
    """Recommend K for a run that uses `now`: the smallest K with a fraction of O, the seconds
    independent of K, below `max_overhead`, or `now`.
    """
    if bounds.high < bounds.low:
        advice = (f"too little data for outer iterations of {MIN_MINIBATCHES} minibatches; use fewer "
                  "workers or more epochs")
        return SampleAdvice(round(bounds.low), advice, enough_data=False)
    enough = overhead_s * rate * (1.0 - max_overhead) / max_overhead
    if enough > now:
        wanted, reason = enough, f"fixed costs of {overhead_s:.2g} s then take {100 * max_overhead:g} %"
    else:
        share = overhead_s / (overhead_s + now / rate)
        taken = f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
        wanted, reason = now, f"as set: fixed costs of {overhead_s:.2g} s take {taken}"
    if wanted > bounds.high:
        return SampleAdvice(_rounded(bounds.high), "more would leave too few outer iterations")
    if wanted < bounds.low:
        return SampleAdvice(round(bounds.low), "with less the Fisher estimates do not converge "
                                               f"({MIN_MINIBATCHES} minibatches)")
    return SampleAdvice(round(wanted) if wanted == now else _rounded(wanted), reason)


def _rounded(value: float) -> int:
    """Round to two significant digits, the accuracy of measured overhead."""
    return int(float(f"{value:.2g}"))
