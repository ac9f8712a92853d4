"""The plan of the next outer iteration: a pure function of the schedule and the progress."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ngsgd.config import ScheduleConfig
from ngsgd.schedules import OuterIteration, Schedule, Shard
from ngsgd.training.job import JobResult, WorkItem


@dataclass(frozen=True)
class Progress:
    """Progress of a run after a committed outer iteration."""

    # the last one committed; -1 before the first
    outer_iter: int = -1
    # passes over archives planned up to and including outer_iter
    passes_done: int = 0
    frames_processed: int = 0
    # training time over all processes that worked on the run
    elapsed_s: float = 0.0
    # work deferred to a later outer iteration
    pending: tuple[WorkItem, ...] = ()
    # work that is never retried, because the workers on it died
    quarantined: tuple[WorkItem, ...] = ()
    # below 1 after roll-backs
    lr_scale: float = 1.0
    # names of examples in quarantine (failure.on_bad_batch)
    bad_examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One outer iteration: its numbers, and the work of each job."""

    iteration: OuterIteration
    work: Work
    # passes that begin in this outer iteration
    num_fresh: int
    # deferred work that this outer iteration includes
    taken_up: tuple[WorkItem, ...] = ()
    # names of examples that the jobs omit
    excluded: tuple[str, ...] = ()

    @property
    def outer_iter(self) -> int:
        return self.iteration.outer_iter

    @property
    def num_jobs(self) -> int:
        return len(self.work)


def upcoming(schedule: Schedule, plan: Plan, job: int, num_workers: int, own: slice | None = None) -> tuple[WorkItem, ...]:
    """Return the work items that the worker of a job probably processes next: a later job, or the
    job of the same number in the next outer iteration. `own` selects the jobs of one site.
    """
    later = job + max(1, num_workers)
    if later < plan.num_jobs:
        return plan.work[later]
    first = (own.start or 0) if own else 0
    number = plan.iteration.passes_done + plan.num_fresh + first + job % max(1, num_workers)
    # close to the number of planned passes, which takes a sum over the run
    if number >= schedule.num_passes:
        return ()
    return (WorkItem(schedule.shard(number), plan.outer_iter + 1, first + job % max(1, num_workers)),)


def next_plan(schedule: Schedule, progress: Progress, partitioner: EqualPartitioner, *, max_jobs: int | None = None,
              own: slice | None = None) -> Plan | None:
    """Return the next outer iteration, or None if all data have been processed.

    Deferred work comes first; after the last outer iteration it runs alone. If `max_jobs` is less
    than the jobs of the schedule, there are fewer jobs and more outer iterations. Number of jobs
    and learning rate are functions of the data processed, so the rest of the schedule is unchanged.
    `own` selects the jobs of one site; numbers and learning rate are those of all sites.
    """
    # passes before each outer iteration, and in total
    planned = [0, *accumulate(schedule.num_jobs(outer_iter) for outer_iter in range(schedule.num_outer_iters))]
    here = progress.passes_done
    outer_iter = progress.outer_iter + 1
    # position of the schedule after so many passes; without a shortage it equals outer_iter
    stage = min(bisect_right(planned, here) - 1, schedule.num_outer_iters - 1)
    num_jobs = min(schedule.num_jobs(stage), max_jobs or planned[-1])
    num_fresh = min(partitioner.num_passes(num_jobs, progress.pending), planned[-1] - here)
    fresh = tuple(WorkItem(schedule.shard(here + job), outer_iter, job) for job in range(num_fresh))
    work = partitioner.work(fresh, progress.pending, num_jobs)
    if not work:
        return None
    is_last = here + num_fresh >= planned[-1]
    lr = schedule.last_lr if is_last else schedule.effective_lr(min(stage, schedule.num_outer_iters - 2), here)
    shards = tuple(pieces[0].shard for pieces in work)
    return Plan(OuterIteration(outer_iter, shards, here, lr * progress.lr_scale), work[own] if own else work, num_fresh,
                progress.pending, excluded=progress.bad_examples)


Work = tuple[tuple[WorkItem, ...], ...]
# factor of the expected amount of work; unfinished work is returned
_AMPLE = 1.3


class EqualPartitioner:
    """Assigns one complete shard to each job, as in Kaldi; deferred work items are extra jobs."""

    # no time limit
    round_s = math.inf

    def num_passes(self, num_jobs: int, pending: Sequence[WorkItem]) -> int:
        """Number of new passes that an outer iteration of `num_jobs` jobs begins."""
        return num_jobs

    def work(self, fresh: Sequence[WorkItem], pending: Sequence[WorkItem], num_jobs: int) -> Work:
        """Work items of each job."""
        return tuple((piece,) for piece in (*fresh, *pending))

    def observe(self, results: Sequence[JobResult]) -> None:
        """Update the estimated speed of the workers from the results of an outer iteration."""


class SpeedPartitioner(EqualPartitioner):
    """Distributes the same amount of data so that all jobs end together: slow workers get less.

    The split depends on measured times, so runs are not reproducible; each job is.
    """

    def __init__(self, num_minibatches: Callable[[Shard], int]) -> None:
        self.num_minibatches = num_minibatches
        # job -> minibatches per second; a job is assigned to the same worker where possible
        self._speed: dict[int, float] = {}

    def work(self, fresh: Sequence[WorkItem], pending: Sequence[WorkItem], num_jobs: int) -> Work:
        pieces = (*pending, *fresh)
        return cut(pieces, self._targets(sum(map(self._size, pieces)), num_jobs), self._size)

    def observe(self, results: Sequence[JobResult]) -> None:
        for result in results:
            self._speed[result.job.job] = result.num_minibatches / max(result.seconds, 1e-9)

    def _targets(self, total: int, num_jobs: int) -> list[int]:
        known = [self._speed[job] for job in range(num_jobs) if job in self._speed]
        typical = sum(known) / len(known) if known else 1.0
        speeds = [self._speed.get(job, typical) for job in range(num_jobs)]
        ends = [round(total * sum(speeds[:job + 1]) / sum(speeds)) for job in range(num_jobs)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def _size(self, piece: WorkItem) -> int:
        stop = self.num_minibatches(piece.shard) if piece.stop is None else piece.stop
        return stop - piece.first


class TimeBudgetPartitioner(SpeedPartitioner):
    """Gives each job a fixed duration; results are weighted by their number of examples."""

    def __init__(self, num_minibatches: Callable[[Shard], int], round_s: float) -> None:
        super().__init__(num_minibatches)
        self.round_s = round_s

    def num_passes(self, num_jobs: int, pending: Sequence[WorkItem]) -> int:
        if not self._speed:
            return num_jobs
        missing = sum(self._targets(0, num_jobs)) - sum(map(self._size, pending))
        return max(0 if pending else 1, math.ceil(missing / self.num_minibatches(Shard(0, 0))))

    def _targets(self, total: int, num_jobs: int) -> list[int]:
        if not self._speed:
            return super()._targets(total, num_jobs)
        typical = sum(self._speed.values()) / len(self._speed)
        return [max(1, round(_AMPLE * self.round_s * self._speed.get(job, typical))) for job in range(num_jobs)]


def make_partitioner(config: ScheduleConfig, count: Callable[[Shard, int], int]) -> EqualPartitioner:
    """Build the configured partitioner; `count(shard, size)` returns the minibatches of a shard."""
    def num_minibatches(shard: Shard) -> int:
        return count(shard, config.minibatch_size)
    if config.load_balancing == "none":
        return EqualPartitioner()
    if config.load_balancing == "speed":
        return SpeedPartitioner(num_minibatches)
    return TimeBudgetPartitioner(num_minibatches, config.sync_interval_s)


def cut(pieces: Sequence[WorkItem], targets: Sequence[int], size: Callable[[WorkItem], int]) -> Work:
    """Split work items in order over jobs of `targets` minibatches; the last job gets the rest."""
    queue = deque(pieces)
    work: list[list[WorkItem]] = []
    for target in targets:
        taken: list[WorkItem] = []
        room = target
        while queue and room > 0:
            piece = queue.popleft()
            if size(piece) > room:
                middle = piece.first + room
                queue.appendleft(replace(piece, first=middle))
                piece = replace(piece, stop=middle)
            room -= size(piece)
            taken.append(piece)
        work.append(taken)
    work[-1] += queue
    return tuple(tuple(taken) for taken in work if taken)
