"""Predictions of the wall-clock time of an outer iteration on N workers.

This module uses no clock and no files. `probe` measures a `Machine`; `formulas` has the formulas
and the letters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ngsgd.planning.formulas import Link, Spread, straggler_factor, travel_time_s

# of Ray's object store: a job and its result are each announced, looked up, requested and sent
# (benchmarks/multi-node.md)
_RAY_MESSAGES = 7


# Inputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Size of the computation of a run."""

    # K, frames of a job; mean over the shards
    samples: float
    minibatch_size: int
    model_bytes: int         # P
    # of the complete run, over all jobs
    total_samples: float
    # bytes of the optimizer between steps, and peak of a step; 0: not predicted
    state_bytes: int = 0
    peak_bytes: int = 0
    # float32 bytes of a parameter delta over those of its compressed form
    compression: float = 1.0


@dataclass(frozen=True)
class Speed:
    """Speed of one worker while `num_processes` of them compute concurrently on one machine.

    More processes than cores share the cores; `rate` and `fixed_s` then include the sharing.
    """

    num_processes: int
    num_threads: int         # per process
    # r, samples per second, after the first minibatches
    rate: float
    # f: loading parameters, opening data, the more expensive first minibatches, returning the
    # result
    fixed_s: float
    # of the coordinator with as many threads, while the workers are idle
    diagnostics_s: float


@dataclass(frozen=True)
class Machine:
    """Measurements of a probe on one machine."""

    num_cores: int
    # GPUs that the workers use; 0: they compute on the cores
    num_gpus: int
    # workers in separate processes; increasing number of processes
    parallel: tuple[Speed, ...]
    # one worker; increasing number of threads
    serial: tuple[Speed, ...]
    # of the job time, as far as measurable on one machine
    spread: Spread
    # between the coordinator and a worker on the same machine
    link: Link
    checkpoint_s: float

    def slots(self, num_threads: int) -> int:
        """Workers of so many threads that can compute at full speed concurrently."""
        return slots_of(num_threads, num_cores=self.num_cores, num_gpus=self.num_gpus)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Machine:
        """Read the values of `to_json`; raise KeyError or TypeError for anything else."""
        parallel, serial = (tuple(Speed(**speed) for speed in values[name])
                            for name in ("parallel", "serial"))
        return cls(**{**values, "parallel": parallel, "serial": serial,
                      "spread": Spread(**values["spread"]), "link": Link(**values["link"])})


@dataclass(frozen=True)
class Site:
    """Location of the workers of a run: one machine, or several like the measured one."""

    num_machines: int
    # workers that a machine runs at full speed concurrently
    slots_per_machine: int
    # between the coordinator and a worker
    link: Link
    # cluster.kind=in_process: one worker runs all jobs sequentially
    one_by_one: bool = False
    # messages in each direction that the exchange of a job and its result takes one after another
    num_messages: int = 1

    @property
    def num_slots(self) -> int:
        return 1 if self.one_by_one else self.num_machines * self.slots_per_machine


def this_machine(machine: Machine, num_workers: int, *, threads_per_worker: int = 0,
                 one_by_one: bool = False) -> Site:
    """The measured machine alone; workers with several threads use as many slots each."""
    threads = threads_per_worker or threads_of(machine.num_cores, num_workers)
    return Site(1, machine.slots(threads), machine.link, one_by_one)


def machines_like(num_workers: int, *, slots_per_machine: int, link: Link) -> Site:
    """As many machines as needed to give each worker a core or GPU."""
    return Site(math.ceil(num_workers / slots_per_machine), slots_per_machine, link, num_messages=_RAY_MESSAGES)


def threads_of(num_cores: int, num_workers: int) -> int:
    """Compute threads of a worker by default (`ngsgd.training.worker.resolve_threads`)."""
    return max(1, num_cores // num_workers)


def slots_of(num_threads: int, *, num_cores: int, num_gpus: int) -> int:
    """Workers that can compute at full speed concurrently."""
    return num_gpus or max(1, num_cores // num_threads)


# Predictions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The parts of one outer iteration, in seconds, as in the event log of a run."""

    num_jobs: int
    samples: float           # of one job
    # K / r: duration of a job that consists only of training
    work_s: float
    # from broadcasting the model to the result of the last job
    compute_s: float
    average_s: float
    checkpoint_s: float
    # waiting time: they run concurrently with the next outer iteration
    diagnostics_s: float
    # concurrent jobs
    slots_used: int
    # duration of the slowest job over K / r: stragglers, or fewer cores than jobs
    stretch: float = 1.0
    # part of compute_s: sending the model and the results
    travel_s: float = 0.0

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
    speed = _speed(machine, site, num_jobs)
    slots = min(num_jobs, site.num_slots)
    work_s = workload.samples / speed.rate
    # the operating system shares the cores evenly, so all jobs end together
    sharing = num_jobs / slots
    sigma = machine.spread.of_job(workload.samples / workload.minibatch_size)
    stretch = max(sharing, straggler_factor(sigma, num_jobs))
    # a machine of a cluster receives the model once, for all of its workers
    num_models = site.num_machines if site.num_machines > 1 else num_jobs
    link = replace(site.link, latency_s=site.link.latency_s * site.num_messages)
    travel_s = travel_time_s(num_jobs, workload.model_bytes, link, num_machines=num_models, compression=workload.compression)
    compute_s = work_s * stretch + sharing * speed.fixed_s + travel_s
    average_s = num_jobs * workload.model_bytes / site.link.add_speed
    # diagnostics run in a thread of low priority: on cores without workers, and on all cores while
    # the coordinator averages and saves
    used = 0 if machine.num_gpus else speed.num_threads * (1 if site.one_by_one
                                                           else math.ceil(num_jobs / site.num_machines))
    hidden_s = average_s + machine.checkpoint_s + (compute_s if used < machine.num_cores else 0.0)
    return Prediction(
        num_jobs=num_jobs, samples=workload.samples, work_s=work_s, slots_used=slots,
        stretch=stretch, travel_s=travel_s,
        compute_s=compute_s, average_s=average_s, checkpoint_s=machine.checkpoint_s,
        diagnostics_s=max(0.0, speed.diagnostics_s - hidden_s))


def _speed(machine: Machine, site: Site, num_jobs: int) -> Speed:
    if site.one_by_one:
        return _between(machine.serial, threads_of(machine.num_cores, num_jobs), "num_threads")
    count = math.ceil(num_jobs / site.num_machines)
    # without sharing, measurements of workers that shared cores do not apply
    if count <= site.slots_per_machine:
        count = min(count, machine.slots(machine.parallel[-1].num_threads))
    return _between(machine.parallel, count, "num_processes")


def _between(measured: Sequence[Speed], wanted: int, axis: str) -> Speed:
    """Interpolate linearly in log-log scale; beyond the ends the nearest point is used."""
    low = max((s for s in measured if getattr(s, axis) <= wanted),
              key=lambda s: float(getattr(s, axis)), default=measured[0])
    high = min((s for s in measured if getattr(s, axis) >= wanted),
               key=lambda s: float(getattr(s, axis)), default=measured[-1])
    start, end = getattr(low, axis), getattr(high, axis)
    if start == end or wanted <= start:
        return low
    share = math.log(wanted / start) / math.log(end / start)

    def mix(name: str) -> float:
        first, second = float(getattr(low, name)), float(getattr(high, name))
        return math.exp((1.0 - share) * math.log(max(first, 1e-9)) + share
                        * math.log(max(second, 1e-9)))
    return replace(low, rate=mix("rate"), fixed_s=mix("fixed_s"),
                   diagnostics_s=mix("diagnostics_s"))
