"""Predictions of the wall-clock time of a run on N workers, and comparison with measured times.

This module uses no clock and no files. `probe` measures a `Machine`; `formulas` has the formulas
and the letters. A prediction is for one outer iteration, and a run is a sequence of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ngsgd.counting import counted
from ngsgd.pipeline.performance_model.formulas import Link, Spread, straggler_factor, travel_time_s
from ngsgd.training.records import OuterIterationRecord

# initial outer iterations of a run from which `extrapolate` predicts the rest
_WATCHED = 3
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
    # once per run: extra duration of the first job of each worker
    warm_up_s: float

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


def predict(machine: Machine, workload: Workload, site: Site, *, num_jobs: int,
            num_workers: int) -> Prediction:
    """Predict one outer iteration; with fewer workers than jobs there are several rounds."""
    busy = min(num_jobs, num_workers)
    rounds = math.ceil(num_jobs / busy)
    speed = _speed(machine, site, num_workers, busy)
    slots = min(busy, site.num_slots)
    work_s = workload.samples / speed.rate
    # the operating system shares the cores evenly, so all jobs of a round end together
    sharing = busy / slots
    sigma = machine.spread.of_job(workload.samples / workload.minibatch_size)
    stretch = rounds * max(sharing, straggler_factor(sigma, busy))
    # a machine of a cluster receives the model once, for all of its workers
    num_models = site.num_machines * rounds if site.num_machines > 1 else num_jobs
    link = replace(site.link, latency_s=site.link.latency_s * site.num_messages)
    travel_s = travel_time_s(num_jobs, workload.model_bytes, link, num_machines=num_models, compression=workload.compression)
    compute_s = work_s * stretch + rounds * sharing * speed.fixed_s + travel_s
    average_s = num_jobs * workload.model_bytes / site.link.add_speed
    # diagnostics run in a thread of low priority: on cores without workers, and on all cores while
    # the coordinator averages and saves
    used = 0 if machine.num_gpus else speed.num_threads * (1 if site.one_by_one
                                                           else math.ceil(busy / site.num_machines))
    hidden_s = average_s + machine.checkpoint_s + (compute_s if used < machine.num_cores else 0.0)
    return Prediction(
        num_jobs=num_jobs, samples=workload.samples, work_s=work_s, slots_used=slots,
        stretch=stretch, travel_s=travel_s,
        compute_s=compute_s, average_s=average_s, checkpoint_s=machine.checkpoint_s,
        diagnostics_s=max(0.0, speed.diagnostics_s - hidden_s))


def _speed(machine: Machine, site: Site, num_workers: int, busy: int) -> Speed:
    if site.one_by_one:
        return _between(machine.serial, threads_of(machine.num_cores, num_workers), "num_threads")
    count = math.ceil(busy / site.num_machines)
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


@dataclass(frozen=True)
class RunPrediction:
    """All outer iterations of a run."""

    iterations: tuple[Prediction, ...]
    # in the first one
    warm_up_s: float
    # description of the source of the prediction
    source: str

    @property
    def total_s(self) -> float:
        return self.warm_up_s + sum(one.outer_iter_s for one in self.iterations)


def predict_run(machine: Machine, workload: Workload, site: Site, job_counts: Sequence[int], *,
                num_workers: int) -> RunPrediction:
    """Predict a run; `job_counts` has the number of jobs of each outer iteration."""
    by_count = {count: predict(machine, workload, site, num_jobs=count, num_workers=num_workers)
                for count in set(job_counts)}
    first = by_count[job_counts[0]]
    turns = min(job_counts[0], num_workers) / first.slots_used
    return RunPrediction(tuple(by_count[count] for count in job_counts), machine.warm_up_s * turns,
                         "a probe of this machine")


def extrapolate(records: Sequence[OuterIterationRecord], job_counts: Sequence[int], *,
                num_slots: int) -> RunPrediction | None:
    """Predict from the first outer iterations of the run; None if there are fewer than two.

    The first one only gives the warm-up. The duration grows with the number of jobs beyond
    `num_slots` (cores, GPUs or workers, whichever are fewest).
    """
    seen = list(records[:_WATCHED])
    if len(seen) < 2:
        return None
    steady = seen[1:]
    base = statistics.fmean(_turns(record.num_jobs, num_slots) for record in steady)
    compute_s, average_s, checkpoint_s, diagnostics_s = (
        statistics.fmean(getattr(record, name) for record in steady)
        for name in ("compute_s", "average_s", "checkpoint_s", "diagnostics_s"))
    jobs = [job for record in steady for job in record.jobs if job.accepted]
    samples = statistics.fmean(job.num_frames for job in jobs)
    iterations = tuple(Prediction(
        num_jobs=count, samples=samples, work_s=statistics.fmean(job.seconds for job in jobs),
        slots_used=min(count, num_slots),
        compute_s=compute_s * _turns(count, num_slots) / base,
        average_s=average_s * count / steady[-1].num_jobs,
        checkpoint_s=checkpoint_s, diagnostics_s=diagnostics_s) for count in job_counts)
    warm_up_s = max(0.0, _seconds(seen[0]) - iterations[0].outer_iter_s)
    return RunPrediction(iterations, warm_up_s, f"its first {counted(len(seen), 'outer iteration')}")


def _turns(num_jobs: int, num_slots: int) -> float:
    return max(1.0, num_jobs / num_slots)


# Comparison ---------------------------------------------------------------------------------------


def compare(records: Sequence[OuterIterationRecord], predicted: RunPrediction) -> list[str]:
    """Return two lines: seconds per outer iteration by part, and in total; empty without records.

    Records are matched by their outer iteration, so a resumed run may contain only new ones.
    """
    pairs = [(record, predicted.iterations[record.outer_iter]) for record in records
             if record.outer_iter < len(predicted.iterations)]
    if not pairs:
        return []
    warm_up_s = predicted.warm_up_s if any(record.outer_iter == 0 for record, _ in pairs) else 0.0
    told_s = warm_up_s + sum(one.outer_iter_s for _, one in pairs)
    took_s = sum(_seconds(record) for record, _ in pairs)
    parts = []
    for label, name in (("jobs", "compute_s"), ("average", "average_s"),
                        ("checkpoint", "checkpoint_s"), ("diagnostics", "diagnostics_s")):
        extra = warm_up_s if name == "compute_s" else 0.0
        told, took = (statistics.fmean(getattr(pair[side], name) for pair in pairs)
                      for side in (1, 0))
        parts.append(f"{label} {_short(told + extra / len(pairs))}/{_short(took)}")
    error = took_s / max(told_s, 1e-9) - 1
    each = (f"predicted {_short(told_s / len(pairs))}, took {_short(took_s / len(pairs))} "
            f"({100 * error:+.0f}%)")
    return [f"an outer iteration: {each}: {', '.join(parts)}",
            f"{len(pairs)} of them: predicted {_short(told_s)}, took {_short(took_s)}; predicted "
            f"from {predicted.source}"]


def _seconds(record: OuterIterationRecord) -> float:
    return record.compute_s + record.average_s + record.checkpoint_s + record.diagnostics_s


def _short(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f}s"
    return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
