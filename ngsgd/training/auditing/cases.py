"""The state of an audit: the runs of one job, and the workers that may repeat it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ngsgd.training.auditing.comparison import Run
from ngsgd.training.job import Job, JobResult, WorkItem

# (outer iteration, job)
Key = tuple[int, int]


@dataclass(eq=False)
class Case:
    """The audit of one job."""

    job: Job
    # worker that runs the original
    worker: int
    # work that the original has done; less than that of the job if it was asked to end early
    pieces: tuple[WorkItem, ...]
    original: JobResult | None = None
    runs: list[Run] = field(default_factory=list)
    # number of the running repetition -> its worker
    running: dict[int, int] = field(default_factory=dict)
    num_failed: int = 0
    # worker that repeats the job so that all repetitions of a round run at the same time
    partner: int = -1
    # time since which no worker is alive that could repeat it
    alone_since: float = math.inf
    has_no_others: bool = False
    # workers that must repeat the job again; empty: any worker that has not run it
    again: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        return self.job.outer_iter, self.job.job

    @property
    def needs_run(self) -> bool:
        """Whether a repetition must begin now; the first is compared with the original."""
        return not self.running and (self.original is not None or not self.runs)

    def may_run_on(self, worker: int) -> bool:
        """Whether a worker may run the next repetition."""
        if self.again:
            return worker in self.again
        # not one that runs the job or has run it
        used = {self.worker, *self.running.values(), *(run.worker for run in self.runs)}
        return worker not in used


@dataclass(frozen=True, eq=False)
class Conclusion:
    """The end of an audit."""

    # the result to average
    result: JobResult
    # False: it is wrong, and the job must run again
    is_right: bool
    # workers at fault, which are in quarantine now
    faulty: tuple[int, ...]


@dataclass
class Round:
    """An outer iteration in which one job of each worker is audited."""

    plan: object
    partners: Mapping[int, int]
    audited: set[int] = field(default_factory=set)


def work_done(pieces: Sequence[WorkItem], remainder: Sequence[WorkItem]) -> tuple[WorkItem, ...]:
    """The work items of a job without the remainder that it left."""
    done = []
    for piece in pieces:
        rest = next((one for one in remainder if (one.shard, one.outer_iter, one.job) == (piece.shard, piece.outer_iter, piece.job)
                     and one.first >= piece.first and (piece.stop is None or one.stop == piece.stop)), None)
        if rest is None:
            done.append(piece)
        elif rest.first > piece.first:
            done.append(replace(piece, stop=rest.first))
    return tuple(done)


def partners(hosts: Mapping[int, str]) -> dict[int, int]:
    """Assign another worker to each worker, on another machine where possible (worker -> machine).

    Every worker is assigned once, so all repetitions of a round can run at the same time.
    """
    workers = sorted(hosts, key=lambda worker: (hosts[worker], worker))
    if len(workers) < 2:
        return {}
    # workers of a machine are neighbors, so a shift by the largest machine leaves every machine,
    # unless it has more than half of the workers
    shift = max(Counter(hosts.values()).values()) % len(workers) or 1
    return {worker: workers[(index + shift) % len(workers)] for index, worker in enumerate(workers)}
