"""Predictions of the wall-clock time of an outer iteration on N workers, and of a good job size.

`probe` measures a `Machine`. Letters:

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
from dataclasses import asdict, dataclass, replace
from typing import Any

from ngsgd.config import RunConfig

# of Ray's object store: a job and its result are each announced, looked up, requested and sent
# (benchmarks/multi-node.md)
_RAY_MESSAGES = 7
# minimum per job: the Fisher estimates are updated at each of the first ten, and converge in them
MIN_MINIBATCHES = 10
# outer iterations, in units of the time constant 1 / (1 - eta) of the outer momentum
_FILL = 5.0
# with fewer outer iterations a run is little more than one average of independent models
MIN_OUTER_ITERS = 20

_NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the logarithm of the job time, in two parts."""

    host: float  # between workers, permanent: another processor, a busy neighbor
    step: float  # of one minibatch; it averages out over a job

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

    `seconds` has one row per round and one column per worker. Effects common to a round (the
    machine was busy for a while) cause no waiting and are removed. This is an analysis of variance
    without interaction; negative parts are zero, and all with one worker or round.
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


@dataclass(frozen=True)
class Link:
    """The link between the coordinator and a worker."""

    bandwidth: float  # B, bytes per second and direction
    latency_s: float   # L
    add_speed: float  # M, bytes of parameters added to a mean per second; 8e9 is a typical memory


def num_arrays_of(config: RunConfig) -> int:
    """Return the arrays of the outer state on a cluster if the workers average; 0: they do not.

    `ngsgd.cluster.exchange.selection` decides so.
    """
    is_central = config.cluster.exchange == "object_store" or config.outer.jobs_keep_state
    return 0 if is_central else 1 + (config.outer.kind != "average")


def travel_time_s(num_jobs: int, num_bytes: float, link: Link, num_arrays: int = 0, *, num_machines: int | None = None,
                  compression: float = 1.0) -> float:
    """Return the transfer time of the model and of the results of N jobs.

    One node sends the model to each machine (default: one per job) and receives the results. With
    `num_arrays` the workers exchange shards of results, then of the model, and the node receives
    these arrays of the new state.
    """
    num_machines = min(num_jobs, num_machines or num_jobs)
    if not num_arrays:
        return 2 * link.latency_s + num_bytes * (num_machines + num_jobs / compression) / link.bandwidth
    together = math.ceil(num_jobs / num_machines)
    others = together * (num_jobs - together) / num_jobs
    return 3 * link.latency_s + num_bytes * (others / compression + others + num_arrays) / link.bandwidth


def adding_time_s(num_jobs: int, num_bytes: float, link: Link, num_arrays: int = 0) -> float:
    """Return the time to add the results; with `num_arrays` each worker adds N shards of 1/N."""
    return (1 + num_arrays if num_arrays else num_jobs) * num_bytes / link.add_speed


def retry_wait_s(rate: float, num_jobs: int, compute_s: float, replace_s: float) -> float:
    """Mean extra time of an outer iteration if lost jobs run again within it and all others wait.

    There are m = N lam C failures per outer iteration, uniform over its C seconds, and the last one
    determines the delay: C (1 - (1 - exp(-m)) / m) + R (1 - exp(-m)). A second failure of the same
    job is neglected, so lam C should be below 0.1.
    """
    expected = num_jobs * rate * compute_s
    if expected == 0.0:
        return 0.0
    any_failure = -math.expm1(-expected)
    return compute_s * (1.0 - any_failure / expected) + replace_s * any_failure


@dataclass(frozen=True)
class SampleBounds:
    """Reasonable range of K."""

    low: float  # ten minibatches
    high: float  # at least `MIN_OUTER_ITERS`, and enough for the outer momentum to converge

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
    enough_data: bool = True  # False: no value is suitable


def recommend_samples(*, now: float, rate: float, overhead_s: float, bounds: SampleBounds,
                      max_overhead: float = 0.1) -> SampleAdvice:
    """Recommend K for a run that uses `now`: the smallest K with a fraction of O, the seconds
    independent of K, below `max_overhead`, or `now`.
    """
    if bounds.high < bounds.low:
        return SampleAdvice(round(bounds.low), "too little data for outer iterations of "
                            f"{MIN_MINIBATCHES} minibatches; use fewer workers or more epochs", enough_data=False)
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
        return SampleAdvice(round(bounds.low), f"with less the Fisher estimates do not converge ({MIN_MINIBATCHES} minibatches)")
    return SampleAdvice(round(wanted) if wanted == now else _rounded(wanted), reason)


def _rounded(value: float) -> int:
    """Round to two significant digits, the accuracy of measured overhead."""
    return int(float(f"{value:.2g}"))


@dataclass(frozen=True)
class Workload:
    """Size of the computation of a run."""

    samples: float  # K, frames of a job; mean over the shards
    minibatch_size: int
    model_bytes: int         # P
    total_samples: float  # of the complete run, over all jobs
    compression: float = 1.0  # float32 bytes of a parameter delta over those of its compressed form


@dataclass(frozen=True)
class Speed:
    """Speed of one worker while `num_processes` of them compute concurrently on one machine.

    More processes than cores share the cores; `rate` and `fixed_s` then include the sharing.
    """

    num_processes: int
    num_threads: int         # per process
    rate: float  # r, samples per second, after the first minibatches
    # f: loading parameters, opening data, the expensive first minibatches, returning the result
    fixed_s: float
    diagnostics_s: float  # of the coordinator with as many threads, while the workers are idle


@dataclass(frozen=True)
class Machine:
    """Measurements of a probe on one machine."""

    num_cores: int
    num_gpus: int  # GPUs that the workers use; 0: they compute on the cores
    parallel: tuple[Speed, ...]  # workers in separate processes; increasing number of processes
    serial: tuple[Speed, ...]  # one worker; increasing number of threads
    spread: Spread  # of the job time, as far as measurable on one machine
    link: Link  # between the coordinator and a worker on the same machine
    checkpoint_s: float

    def slots(self, num_threads: int) -> int:
        """Workers of so many threads that can compute at full speed concurrently."""
        return slots_of(num_threads, num_cores=self.num_cores, num_gpus=self.num_gpus)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Machine:
        """Read the values of `to_json`; raise KeyError or TypeError for anything else."""
        parallel, serial = (tuple(Speed(**speed) for speed in values[name]) for name in ("parallel", "serial"))
        return cls(**{**values, "parallel": parallel, "serial": serial,
                      "spread": Spread(**values["spread"]), "link": Link(**values["link"])})


@dataclass(frozen=True)
class Site:
    """Location of the workers of a run: one machine, or several like the measured one."""

    num_machines: int
    slots_per_machine: int  # workers that a machine runs at full speed concurrently
    link: Link  # between the coordinator and a worker
    one_by_one: bool = False  # cluster.kind=in_process: one worker runs all jobs sequentially
    # messages in each direction that the exchange of a job and its result takes one after another
    num_messages: int = 1
    # of the outer state, which the coordinator receives if the workers average; 0: it averages
    num_arrays: int = 0

    @property
    def num_slots(self) -> int:
        return 1 if self.one_by_one else self.num_machines * self.slots_per_machine


def this_machine(machine: Machine, num_workers: int, *, threads_per_worker: int = 0, one_by_one: bool = False) -> Site:
    """The measured machine alone; workers with several threads use as many slots each."""
    threads = threads_per_worker or threads_of(machine.num_cores, num_workers)
    return Site(1, machine.slots(threads), machine.link, one_by_one)


def machines_like(num_workers: int, *, slots_per_machine: int, link: Link, num_arrays: int = 0) -> Site:
    """As many machines as needed to give each worker a core or GPU."""
    num_machines = math.ceil(num_workers / slots_per_machine)
    return Site(num_machines, slots_per_machine, link, num_messages=_RAY_MESSAGES, num_arrays=num_arrays)


def threads_of(num_cores: int, num_workers: int) -> int:
    """Compute threads of a worker by default (`ngsgd.training.worker.resolve_threads`)."""
    return max(1, num_cores // num_workers)


def slots_of(num_threads: int, *, num_cores: int, num_gpus: int) -> int:
    """Workers that can compute at full speed concurrently."""
    return num_gpus or max(1, num_cores // num_threads)


@dataclass(frozen=True)
class Prediction:
    """The parts of one outer iteration, in seconds, as in the event log of a run."""

    num_jobs: int
    samples: float           # of one job
    work_s: float  # K / r: duration of a job that consists only of training
    compute_s: float  # from broadcasting the model to the result of the last job
    average_s: float
    checkpoint_s: float
    diagnostics_s: float  # waiting time: they run concurrently with the next outer iteration
    slots_used: int  # concurrent jobs
    # duration of the slowest job over K / r: stragglers, or fewer cores than jobs
    stretch: float = 1.0
    travel_s: float = 0.0  # part of compute_s: sending the model and the results

    @property
    def outer_iter_s(self) -> float:
        return self.compute_s + self.average_s + self.checkpoint_s + self.diagnostics_s

    @property
    def efficiency(self) -> float:
        """Fraction of the time of cores or GPUs that is spent on training, 0 to 1."""
        return self.num_jobs * self.work_s / (self.slots_used * self.outer_iter_s)

    @property
    def frames_per_s(self) -> float:
        return self.num_jobs * self.samples / self.outer_iter_s

    @property
    def overhead_s(self) -> float:
        """O: duration if a job had no samples."""
        return self.outer_iter_s - self.work_s * self.stretch

    @property
    def effective_rate(self) -> float:
        """Samples per second of one job, including waiting for stragglers and for a core."""
        return self.samples / (self.work_s * self.stretch)


def predict(machine: Machine, workload: Workload, site: Site, num_jobs: int) -> Prediction:
    """Predict one outer iteration with a worker for each job."""
    if site.one_by_one:
        speed = _between(machine.serial, threads_of(machine.num_cores, num_jobs), "num_threads")
    else:
        count = math.ceil(num_jobs / site.num_machines)
        # without sharing, measurements of workers that shared cores do not apply
        if count <= site.slots_per_machine:
            count = min(count, machine.slots(machine.parallel[-1].num_threads))
        speed = _between(machine.parallel, count, "num_processes")
    slots = min(num_jobs, site.num_slots)
    work_s = workload.samples / speed.rate
    # the operating system shares the cores evenly, so all jobs end together
    sharing = num_jobs / slots
    sigma = machine.spread.of_job(workload.samples / workload.minibatch_size)
    stretch = max(sharing, straggler_factor(sigma, num_jobs))
    # a machine of a cluster receives the model once, for all of its workers
    num_models = site.num_machines if site.num_machines > 1 else num_jobs
    link = replace(site.link, latency_s=site.link.latency_s * site.num_messages)
    size, packing = workload.model_bytes, workload.compression
    travel_s = travel_time_s(num_jobs, size, link, site.num_arrays, num_machines=num_models, compression=packing)
    compute_s = work_s * stretch + sharing * speed.fixed_s + travel_s
    average_s = adding_time_s(num_jobs, size, site.link, site.num_arrays)
    # diagnostics run in a thread of low priority: on cores without workers, and on all cores while
    # the coordinator averages and saves
    used = 0 if machine.num_gpus else speed.num_threads * (1 if site.one_by_one else math.ceil(num_jobs / site.num_machines))
    hidden_s = average_s + machine.checkpoint_s + (compute_s if used < machine.num_cores else 0.0)
    return Prediction(num_jobs=num_jobs, samples=workload.samples, work_s=work_s, slots_used=slots,
                      stretch=stretch, travel_s=travel_s, compute_s=compute_s, average_s=average_s,
                      checkpoint_s=machine.checkpoint_s, diagnostics_s=max(0.0, speed.diagnostics_s - hidden_s))


def _between(measured: Sequence[Speed], wanted: int, axis: str) -> Speed:
    """Interpolate linearly in log-log scale; beyond the ends the nearest point is used."""
    low = max((s for s in measured if getattr(s, axis) <= wanted), key=lambda s: float(getattr(s, axis)), default=measured[0])
    high = min((s for s in measured if getattr(s, axis) >= wanted), key=lambda s: float(getattr(s, axis)), default=measured[-1])
    start, end = getattr(low, axis), getattr(high, axis)
    if start == end or wanted <= start:
        return low
    share = math.log(wanted / start) / math.log(end / start)

    def mix(name: str) -> float:
        first, second = (math.log(max(float(getattr(speed, name)), 1e-9)) for speed in (low, high))
        return math.exp((1.0 - share) * first + share * second)
    return replace(low, rate=mix("rate"), fixed_s=mix("fixed_s"), diagnostics_s=mix("diagnostics_s"))
