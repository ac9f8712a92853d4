"""How long an outer iteration takes on N workers, what failures cost, and how many samples a job should have: formulas.

No clock, no files: `ngsgd.pipeline.performance_model.probe` measures what goes in.  Letters:
N jobs (one per worker)   K samples (frames) of a job       r samples per second of one worker
P bytes of the model      B bytes per second of a link      L seconds of latency        M bytes per second added into a mean
f seconds of a job that do not grow with K                  sigma log-normal spread of a job's time      z_N normal score
lam failures per second and worker                          R seconds until a lost worker is replaced

Sources: z_N is Blom's approximation (1958); the costs of tree, ring and halving-doubling are those of Thakur, Rabenseifner
and Gropp (2005); drop and restart costs follow from exponential failure times.  docs/planner.md has the derivations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# of a job: the Fisher estimates are updated at each of the first ten, and settle in them
MIN_MINIBATCHES = 10
# outer iterations, in units of the outer momentum's time constant 1 / (1 - eta)
FILL = 5.0

_NORMAL = statistics.NormalDist()


# Computing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the logarithm of a job's time, in two parts."""

    # between workers, for good: another processor, a busy neighbour
    host: float
    # of one minibatch; over a job it averages out
    step: float

    def of_job(self, num_minibatches: float) -> float:
        """sigma of a job of that many minibatches."""
        return math.sqrt(self.host ** 2 + self.step ** 2 / max(num_minibatches, 1.0))


def normal_score(count: int) -> float:
    """z_N: where the largest of `count` standard normal numbers lies, about (Blom)."""
    return _NORMAL.inv_cdf((count - 0.375) / (count + 0.25))


def slowest_over_median(sigma: float, count: int) -> float:
    """The slowest of `count` log-normal times over their median."""
    return math.exp(sigma * normal_score(count))


def straggler_factor(sigma: float, count: int) -> float:
    """The slowest of `count` log-normal times over their mean: what a round of fixed samples waits for.

    From N = 4 on it is off by less than 0.3 % for sigma up to 0.1, 0.7 % up to 0.2, 3.3 % up to 0.4.  Rounds of fixed time
    have no such factor.
    """
    # for one worker the formula gives the median, which lies below the mean
    return max(1.0, math.exp(-sigma ** 2 / 2) * slowest_over_median(sigma, count))


def split_spread(seconds: Sequence[Sequence[float]], num_minibatches: float) -> Spread:
    """The two parts of the spread, from times of jobs of `num_minibatches` each: one row per round, one column per worker.

    What is common to a round (the machine was busy for a while) makes nobody wait, and is taken out.  Analysis of variance
    without interaction; parts that come out negative are zero.  With one worker or one round nothing can be told: zeros.
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
    """What lies between two workers, or a worker and the coordinator."""

    # B, bytes per second, each way
    bandwidth: float
    latency_s: float   # L
    # M, bytes of parameters added into a mean per second; 8e9 is a typical memory
    add_speed: float


def central_s(num_jobs: int, num_bytes: float, link: Link) -> float:
    """One place receives N models, adds them and sends N back, all through its own link."""
    return 2 * link.latency_s + 2 * num_jobs * num_bytes / link.bandwidth + num_jobs * num_bytes / link.add_speed


def tree_s(num_jobs: int, num_bytes: float, link: Link, *, radix: int) -> float:
    """Up and down a tree whose nodes have `radix` children."""
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
    """Each of S places averages 1/S of the model (a parameter server)."""
    part = num_jobs * num_bytes / num_shards
    return 2 * link.latency_s + 2 * part / link.bandwidth + part / link.add_speed


def averaging_times(num_jobs: int, num_bytes: float, link: Link, *, compression: float = 1.0) -> dict[str, float]:
    """Seconds of each way to average; `compression` c sends P / c bytes."""
    size = num_bytes / compression
    return {"central": central_s(num_jobs, size, link), "tree of 8": tree_s(num_jobs, size, link, radix=8),
            "ring": ring_s(num_jobs, size, link), "halving-doubling": halving_doubling_s(num_jobs, size, link),
            "8 shards": sharded_s(num_jobs, size, link, num_shards=8)}


def exposed_s(average_s: float, *, overlap_steps: float, step_s: float) -> float:
    """What is left of the averaging when workers go on for `overlap_steps` minibatches meanwhile."""
    return max(0.0, average_s - overlap_steps * step_s)


# An outer iteration -------------------------------------------------------------------------------


def efficiency(work_s: float, outer_iter_s: float) -> float:
    """Share of an outer iteration in which a worker trains; `work_s` is K / r."""
    return work_s / outer_iter_s


def frames_per_s(num_jobs: int, samples: float, outer_iter_s: float, kept: float = 1.0) -> float:
    """Speed of the run; `kept` is the share that failures leave."""
    return num_jobs * samples * kept / outer_iter_s


# Failures -----------------------------------------------------------------------------------------


def kept_when_dropped(rate: float, outer_iter_s: float, replace_s: float) -> float:
    """Share of the work that counts when a failed job is left out and nobody waits for it.

    A failure loses half an outer iteration of one worker on average, and the time of replacing it.
    """
    return 1.0 / (1.0 + rate * (outer_iter_s / 2 + replace_s))


def retry_wait_s(rate: float, num_jobs: int, compute_s: float, replace_s: float) -> float:
    """How much longer an outer iteration takes on average when lost jobs run again within it and all others wait.

    Failures come at m = N lam C per outer iteration, uniform over its C seconds; the last of them decides:
    C (1 - (1 - exp(-m)) / m) + R (1 - exp(-m)), at most C + R.  A second failure of the same job is left out, so it holds
    while a worker rarely fails within one outer iteration: lam C below 0.1.
    """
    expected = num_jobs * rate * compute_s
    if expected == 0.0:
        return 0.0
    any_failure = -math.expm1(-expected)
    return compute_s * (1.0 - any_failure / expected) + replace_s * any_failure


def restart_all_s(rate: float, num_jobs: int, outer_iter_s: float, replace_s: float) -> float:
    """Mean seconds of an outer iteration when any failure makes all workers begin it again; may be infinite."""
    together = num_jobs * rate
    if together == 0.0:
        return outer_iter_s
    try:
        return math.expm1(together * outer_iter_s) * (1.0 / together + replace_s)
    except OverflowError:
        return math.inf


# Statistics ---------------------------------------------------------------------------------------


def data_factor(samples: float, gamma: float) -> float:
    """m(N, K) = 1 + gamma K: how many times the data a run needs when jobs go their own way for K samples."""
    return 1.0 + gamma * samples


def fit_gamma(data_needed: Mapping[float, float]) -> float:
    """gamma of m = 1 + gamma K by least squares, from the samples needed to reach one objf at two or more K."""
    if len(data_needed) < 2:
        raise ValueError("gamma takes runs at two different K at least")
    slope, intercept = statistics.linear_regression(list(data_needed), list(data_needed.values()))
    return max(0.0, slope / intercept)


def time_to_quality(samples: float, *, rate: float, overhead_s: float, gamma: float) -> float:
    """Seconds per sample's worth of progress, (K / r + O)(1 + gamma K) / K; only its minimum over K matters."""
    return (samples / rate + overhead_s) * data_factor(samples, gamma) / samples


def best_samples(*, rate: float, overhead_s: float, gamma: float) -> float:
    """K* = sqrt(O r / gamma), where `time_to_quality` is least; O are the seconds that do not grow with K."""
    return math.sqrt(overhead_s * rate / gamma) if gamma > 0.0 else math.inf


@dataclass(frozen=True)
class SampleBounds:
    """Between which K a run makes sense."""

    low: float    # ten minibatches
    # enough outer iterations for the outer momentum to fill
    high: float

    @classmethod
    def of(cls, *, minibatch_size: int, total_samples: float, num_jobs: int, outer_momentum: float) -> SampleBounds:
        """`total_samples` are those of the whole run, over all jobs."""
        outer_iters = FILL / (1.0 - outer_momentum)
        return cls(float(MIN_MINIBATCHES * minibatch_size), total_samples / (num_jobs * outer_iters))


@dataclass(frozen=True)
class SampleAdvice:
    """A value for egs.samples_per_iter, and why."""

    samples: int
    reason: str
    # False: no value would do
    enough_data: bool = True


def recommend_samples(*, now: float, rate: float, overhead_s: float, bounds: SampleBounds, gamma: float | None = None,
                      max_overhead: float = 0.1) -> SampleAdvice:
    """K for a run that now has `now`; without gamma the smallest that keeps O below the share `max_overhead`, or `now`."""
    enough = overhead_s * rate * (1.0 - max_overhead) / max_overhead
    if bounds.high < bounds.low:
        told = f"too little data for outer iterations of {MIN_MINIBATCHES} minibatches; take fewer workers or more epochs"
        return SampleAdvice(round(bounds.low), told, enough_data=False)
    if gamma is not None:
        wanted, reason = best_samples(rate=rate, overhead_s=overhead_s, gamma=gamma), f"sqrt(O r / gamma), gamma {gamma:.2g}"
    elif enough > now:
        wanted, reason = enough, f"fixed costs of {overhead_s:.2g} s then take {100 * max_overhead:g} %"
    else:
        wanted, reason = now, f"as set: fixed costs of {overhead_s:.2g} s take {_percent(overhead_s / (overhead_s + now / rate))}"
    if wanted > bounds.high:
        return SampleAdvice(_rounded(bounds.high), "no more, or too few outer iterations are left")
    if wanted < bounds.low:
        return SampleAdvice(round(bounds.low), f"no less, or the Fisher estimates do not settle ({MIN_MINIBATCHES} minibatches)")
    return SampleAdvice(round(wanted) if wanted == now else _rounded(wanted), reason)


def _rounded(value: float) -> int:
    """Two significant digits: nobody measures overhead to three."""
    return int(float(f"{value:.2g}"))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
