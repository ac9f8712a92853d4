"""Formulas for the duration of an outer iteration on N workers, the cost of failures, and job size.

They use no clock and no files; `ngsgd.planning.probe` measures the inputs.
Letters:

    N jobs (one per worker)             K samples (frames) of a job
    r samples per second of one worker  P bytes of the model
    B bytes per second of a link        L seconds of latency
    M bytes per second added to a mean  f seconds of a job that are independent of K
    sigma log-normal spread of job time z_N normal score
    lam failures per second and worker  R seconds until a lost worker is replaced

Sources: z_N is the approximation of Blom (1958). The costs of tree, ring and halving-doubling are
those of Thakur, Rabenseifner and Gropp (2005). Drop and restart costs follow from exponential
failure times. docs/planner.md has the derivations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# minimum per job: the Fisher estimates are updated at each of the first ten, and converge in them
MIN_MINIBATCHES = 10
# outer iterations, in units of the time constant 1 / (1 - eta) of the outer momentum
FILL = 5.0
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


def slowest_over_median(sigma: float, count: int) -> float:
    """The slowest of `count` log-normal times over their median."""
    return math.exp(sigma * normal_score(count))


def straggler_factor(sigma: float, count: int) -> float:
    """The slowest of `count` log-normal times over their mean: factor of synchronous rounds.

    For N >= 4 its error is less than 0.3 % for sigma up to 0.1, 0.7 % up to 0.2, 3.3 % up to 0.4.
    Rounds of fixed duration have no such factor.
    """
    # for one worker the formula gives the median, which is below the mean
    return max(1.0, math.exp(-sigma ** 2 / 2) * slowest_over_median(sigma, count))


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


# Averaging ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The link between two workers, or a worker and the coordinator."""

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


def tree_s(num_jobs: int, num_bytes: float, link: Link, *, radix: int) -> float:
    """Reduction and broadcast in a tree whose nodes have `radix` children."""
    # log(1000, 10) must not be 2.9999999999999996
    depth = math.ceil(round(math.log(max(num_jobs, 1), radix), 9))
    return depth * (2 * (link.latency_s + radix * num_bytes / link.bandwidth) + radix * num_bytes / link.add_speed)


def ring_s(num_jobs: int, num_bytes: float, link: Link) -> float:
    return 2 * (num_jobs - 1) * (link.latency_s + num_bytes / (num_jobs * link.bandwidth)) + num_bytes / link.add_speed


def halving_doubling_s(num_jobs: int, num_bytes: float, link: Link) -> float:
    """Reduce-scatter by halving, all-gather by doubling."""
    travel = 2 * num_bytes * (num_jobs - 1) / (num_jobs * link.bandwidth)
    return 2 * math.log2(num_jobs) * link.latency_s + travel + num_bytes / link.add_speed


def sharded_s(num_jobs: int, num_bytes: float, link: Link, *, num_shards: int) -> float:
    """Each of S nodes averages 1/S of the model (a parameter server)."""
    part = num_jobs * num_bytes / num_shards
    return 2 * link.latency_s + 2 * part / link.bandwidth + part / link.add_speed


def averaging_times(num_jobs: int, num_bytes: float, link: Link, *, compression: float = 1.0) -> dict[str, float]:
    """Seconds of each averaging method; `compression` c sends P / c bytes."""
    size = num_bytes / compression
    return {"central": central_s(num_jobs, size, link), "tree of 8": tree_s(num_jobs, size, link, radix=8),
            "ring": ring_s(num_jobs, size, link), "halving-doubling": halving_doubling_s(num_jobs, size, link),
            "8 shards": sharded_s(num_jobs, size, link, num_shards=8)}


def exposed_s(average_s: float, *, overlap_steps: float, step_s: float) -> float:
    """Averaging time that is not hidden by `overlap_steps` minibatches of computation."""
    return max(0.0, average_s - overlap_steps * step_s)


# An outer iteration -------------------------------------------------------------------------------


def efficiency(work_s: float, outer_iter_s: float) -> float:
    """Fraction of an outer iteration in which a worker trains; `work_s` is K / r."""
    return work_s / outer_iter_s


def frames_per_s(num_jobs: int, samples: float, outer_iter_s: float, kept: float = 1.0) -> float:
    """Speed of the run; `kept` is the fraction that remains after failures."""
    return num_jobs * samples * kept / outer_iter_s


# Failures -----------------------------------------------------------------------------------------


def kept_when_dropped(rate: float, outer_iter_s: float, replace_s: float) -> float:
    """Fraction of the work that counts if failed jobs are dropped and nothing waits for them.

    A failure loses half an outer iteration of one worker on average, and the replacement time.
    """
    return 1.0 / (1.0 + rate * (outer_iter_s / 2 + replace_s))


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


def restart_all_s(rate: float, num_jobs: int, outer_iter_s: float, replace_s: float) -> float:
    """Mean duration of an outer iteration if failures restart all workers; may be infinite."""
    together = num_jobs * rate
    if together == 0.0:
        return outer_iter_s
    try:
        return math.expm1(together * outer_iter_s) * (1.0 / together + replace_s)
    except OverflowError:
        return math.inf


# Statistics ---------------------------------------------------------------------------------------


def data_factor(samples: float, gamma: float) -> float:
    """m(N, K) = 1 + gamma K: factor of the data needed if jobs run independently for K samples."""
    return 1.0 + gamma * samples


def fit_gamma(data_needed: Mapping[float, float]) -> float:
    """Fit gamma of m = 1 + gamma K by least squares.

    Args:
        data_needed: K -> samples needed to reach one objf, for two or more K.
    """
    if len(data_needed) < 2:
        raise ValueError("gamma requires runs at two or more different K")
    slope, intercept = statistics.linear_regression(list(data_needed), list(data_needed.values()))
    return max(0.0, slope / intercept)


def time_to_quality(samples: float, *, rate: float, overhead_s: float, gamma: float) -> float:
    """Seconds per sample of progress, (K / r + O)(1 + gamma K) / K, to be minimized over K."""
    return (samples / rate + overhead_s) * data_factor(samples, gamma) / samples


def best_samples(*, rate: float, overhead_s: float, gamma: float) -> float:
    """K* = sqrt(O r / gamma) minimizes `time_to_quality`; O are the seconds independent of K."""
    return math.sqrt(overhead_s * rate / gamma) if gamma > 0.0 else math.inf


@dataclass(frozen=True)
class SampleBounds:
    """Reasonable range of K."""

    low: float    # ten minibatches
    # at least `MIN_OUTER_ITERS`, and enough for the outer momentum to converge
    high: float

    @classmethod
    def of(cls, *, minibatch_size: int, total_samples: float, num_jobs: int, outer_momentum: float) -> SampleBounds:
        """`total_samples` are those of the complete run, over all jobs."""
        outer_iters = max(MIN_OUTER_ITERS, FILL / (1.0 - outer_momentum))
        return cls(float(MIN_MINIBATCHES * minibatch_size), total_samples / (num_jobs * outer_iters))


@dataclass(frozen=True)
class SampleAdvice:
    """A value for egs.samples_per_iter, and the reason."""

    samples: int
    reason: str
    # False: no value is suitable
    enough_data: bool = True


def recommend_samples(*, now: float, rate: float, overhead_s: float, bounds: SampleBounds, gamma: float | None = None,
                      max_overhead: float = 0.1) -> SampleAdvice:
    """Recommend K for a run that uses `now`.

    Without gamma it is the smallest K with a fraction of O below `max_overhead`, or `now`.
    """
    enough = overhead_s * rate * (1.0 - max_overhead) / max_overhead
    if bounds.high < bounds.low:
        told = (
            f"too little data for outer iterations of {MIN_MINIBATCHES} minibatches; use fewer "
            "workers or more epochs"
        )
        return SampleAdvice(round(bounds.low), told, enough_data=False)
    if gamma is not None:
        wanted, reason = best_samples(rate=rate, overhead_s=overhead_s, gamma=gamma), f"sqrt(O r / gamma), gamma {gamma:.2g}"
    elif enough > now:
        wanted, reason = enough, (
            f"fixed costs of {overhead_s:.2g} s then take {100 * max_overhead:g} %"
        )
    else:
        wanted, reason = now, f"as set: fixed costs of {overhead_s:.2g} s take {_percent(overhead_s / (overhead_s + now / rate))}"
    if wanted > bounds.high:
        return SampleAdvice(_rounded(bounds.high), "more would leave too few outer iterations")
    if wanted < bounds.low:
        return SampleAdvice(round(bounds.low), "with less the Fisher estimates do not converge "
                                               f"({MIN_MINIBATCHES} minibatches)")
    return SampleAdvice(round(wanted) if wanted == now else _rounded(wanted), reason)


def _rounded(value: float) -> int:
    """Round to two significant digits, the accuracy of measured overhead."""
    return int(float(f"{value:.2g}"))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
