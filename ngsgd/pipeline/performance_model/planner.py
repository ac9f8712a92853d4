"""Predictions of a run's wall-clock time on N workers, and a comparison with what it then took.

No clock, no files: `probe` measures a `Machine`, `formulas` has the formulas and
the letters.  A prediction is for one outer iteration; a run is a sequence of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ngsgd.pipeline.performance_model.formulas import Link, Spread, central_s, straggler_factor
from ngsgd.training.records import OuterIterationRecord

# outer iterations at the start of a run from which `extrapolate` tells the rest
_WATCHED = 3


# What is known ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """What a run asks of a machine."""

    # K, frames of a job; mean over the shards
    samples: float
    minibatch_size: int
    model_bytes: int         # P
    # of the whole run, over all jobs
    total_samples: float
    # of the optimizer between steps, and of a step at its largest; 0: not predicted
    state_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Speed:
    """One worker while `num_processes` of them compute at the same time on one machine.

    More processes than cores take turns; `rate` and `fixed_s` are then those of a worker in its
    turns.
    """

    num_processes: int
    num_threads: int         # of each
    # r, samples per second, after the first minibatches
    rate: float
    # f: loading parameters, opening data, the dearer first minibatches, returning the result
    fixed_s: float
    # of the coordinator with as many threads, while the workers rest
    diagnostics_s: float


@dataclass(frozen=True)
class Machine:
    """What a probe found out about one machine."""

    num_cores: int
    # that the workers use; 0: they compute on the cores
    num_gpus: int
    # workers in processes of their own; rising number of processes
    parallel: tuple[Speed, ...]
    # one worker; rising number of threads
    serial: tuple[Speed, ...]
    # of a job's time, as far as one machine can tell
    spread: Spread
    # between the coordinator and a worker on the same machine
    link: Link
    checkpoint_s: float
    # once per run: how much longer each worker's first job takes
    warm_up_s: float

    def slots(self, num_threads: int) -> int:
        """Workers of so many threads that can compute at full speed at the same time."""
        return slots_of(num_threads, num_cores=self.num_cores, num_gpus=self.num_gpus)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Machine:
        """What `to_json` gave; raises KeyError or TypeError for anything else."""
        parallel, serial = (tuple(Speed(**speed) for speed in values[name])
                            for name in ("parallel", "serial"))
        return cls(**{**values, "parallel": parallel, "serial": serial,
                      "spread": Spread(**values["spread"]), "link": Link(**values["link"])})


@dataclass(frozen=True)
class Site:
    """Where a run's workers are: one machine, or several like the one that was measured."""

    num_machines: int
    # workers that a machine runs at full speed at the same time
    slots_per_machine: int
    # between the coordinator and a worker
    link: Link
    # cluster.kind=in_process: one worker does all jobs, one after another
    one_by_one: bool = False

    @property
    def num_slots(self) -> int:
        return 1 if self.one_by_one else self.num_machines * self.slots_per_machine


def this_machine(machine: Machine, num_workers: int, *, threads_per_worker: int = 0,
                 one_by_one: bool = False) -> Site:
    """The measured machine alone; workers with several threads take as many slots each."""
    threads = threads_per_worker or threads_of(machine.num_cores, num_workers)
    return Site(1, machine.slots(threads), machine.link, one_by_one)


def machines_like(num_workers: int, *, slots_per_machine: int, link: Link) -> Site:
    """As many machines as it takes to give each worker a core or GPU of its own."""
    return Site(math.ceil(num_workers / slots_per_machine), slots_per_machine, link)


def threads_of(num_cores: int, num_workers: int) -> int:
    """Compute threads of a worker where the configuration leaves it open
    (`ngsgd.training.worker.resolve_threads`).
    """
    return max(1, num_cores // num_workers)


def slots_of(num_threads: int, *, num_cores: int, num_gpus: int) -> int:
    """Workers that can compute at full speed at the same time."""
    return num_gpus or max(1, num_cores // num_threads)


# Predictions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The parts of one outer iteration, in seconds, as a run's event log has them."""

    num_jobs: int
    samples: float           # of one job
    # K / r: what a job would take if nothing but training took time
    work_s: float
    # from broadcasting the model to the last job's result
    compute_s: float
    average_s: float
    checkpoint_s: float
    # waited for: they run beside the next outer iteration
    diagnostics_s: float
    # jobs that run at the same time
    slots_used: int
    # how many times K / r the slowest job takes: stragglers, or fewer cores than jobs
    stretch: float = 1.0
    # part of compute_s: sending the model out and the results back
    travel_s: float = 0.0

    @property
    def outer_iter_s(self) -> float:
        return self.compute_s + self.average_s + self.checkpoint_s + self.diagnostics_s

    @property
    def efficiency(self) -> float:
        """Share of the cores' or GPUs' time that is spent on training, 0 to 1."""
        return self.num_jobs * self.work_s / (self.slots_used * self.outer_iter_s)

    @property
    def frames_per_s(self) -> float:
        return self.num_jobs * self.samples / self.outer_iter_s

    @property
    def overhead_s(self) -> float:
        """O: what would stay if a job had no samples."""
        return self.outer_iter_s - self.work_s * self.stretch

    @property
    def effective_rate(self) -> float:
        """Samples per second of one job, with waiting for stragglers and for a core."""
        return self.samples / (self.work_s * self.stretch)


def predict(machine: Machine, workload: Workload, site: Site, *, num_jobs: int,
            num_workers: int) -> Prediction:
    """One outer iteration of `num_jobs` jobs; with fewer workers than jobs they take turns."""
    busy = min(num_jobs, num_workers)
    rounds = math.ceil(num_jobs / busy)
    speed = _speed(machine, site, num_workers, busy)
    slots = min(busy, site.num_slots)
    work_s = workload.samples / speed.rate
    # the operating system shares the cores evenly, so all jobs of a round end together, and none
    # waits for another
    sharing = busy / slots
    sigma = machine.spread.of_job(workload.samples / workload.minibatch_size)
    stretch = rounds * max(sharing, straggler_factor(sigma, busy))
    travel_s = central_s(num_jobs, workload.model_bytes, replace(site.link, add_speed=math.inf))
    compute_s = work_s * stretch + rounds * sharing * speed.fixed_s + travel_s
    average_s = num_jobs * workload.model_bytes / site.link.add_speed
    # a thread of low priority: it has cores that no worker uses, and all of them while the
    # coordinator averages and saves
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
    # nobody takes turns, so a measurement of workers that did says nothing
    if count <= site.slots_per_machine:
        count = min(count, machine.slots(machine.parallel[-1].num_threads))
    return _between(machine.parallel, count, "num_processes")


def _between(measured: Sequence[Speed], wanted: int, axis: str) -> Speed:
    """Straight lines between measured points, both axes logarithmic; beyond the ends the nearest
    point.
    """
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
    # in words: what it was made from
    source: str

    @property
    def total_s(self) -> float:
        return self.warm_up_s + sum(one.outer_iter_s for one in self.iterations)


def predict_run(machine: Machine, workload: Workload, site: Site, job_counts: Sequence[int], *,
                num_workers: int) -> RunPrediction:
    """`job_counts` has the number of jobs of each outer iteration."""
    by_count = {count: predict(machine, workload, site, num_jobs=count, num_workers=num_workers)
                for count in set(job_counts)}
    first = by_count[job_counts[0]]
    turns = min(job_counts[0], num_workers) / first.slots_used
    return RunPrediction(tuple(by_count[count] for count in job_counts), machine.warm_up_s * turns,
                         "a probe of this machine")


def extrapolate(records: Sequence[OuterIterationRecord], job_counts: Sequence[int], *,
                num_slots: int) -> RunPrediction | None:
    """A prediction from a run's own first outer iterations; None when there are fewer than two of
    them.

    The first one is left out and gives the warm-up.  Where the number of jobs grows, their time
    does once there are more of them than `num_slots` (cores, GPUs or workers, whichever are
    fewest).
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
    return RunPrediction(iterations, warm_up_s, f"its first {len(seen)} outer iterations")


def _turns(num_jobs: int, num_slots: int) -> float:
    return max(1.0, num_jobs / num_slots)


# Beside the actual --------------------------------------------------------------------------------


def compare(records: Sequence[OuterIterationRecord], predicted: RunPrediction) -> list[str]:
    """Two lines: seconds per outer iteration by part, and in all; empty when there are no records.

    Records are matched by their outer iteration, so a resumed run may give only what it did itself.
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
