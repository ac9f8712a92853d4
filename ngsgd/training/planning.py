"""The plan of the next outer iteration: a pure function of the schedule and the progress."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ngsgd.schedules import OuterIteration, Schedule
from ngsgd.training.job import WorkItem
from ngsgd.training.partitioning import EqualPartitioner, Work


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
    # factors on the learning rates of layers (optimizer.equalize_layers)
    layer_rates: Mapping[str, float] = field(default_factory=dict)
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
    # keep only the best job (early outer iterations in Kaldi)
    keeps_best: bool = False
    # factors on the learning rates of layers
    layer_rates: Mapping[str, float] = field(default_factory=dict)
    # names of examples that the jobs omit
    excluded: tuple[str, ...] = ()

    @property
    def outer_iter(self) -> int:
        return self.iteration.outer_iter

    @property
    def num_jobs(self) -> int:
        return len(self.work)


def passes_by_outer_iter(schedule: Schedule) -> list[int]:
    """Number of passes planned before each outer iteration, and in total."""
    return [0, *accumulate(schedule.num_jobs(outer_iter) for outer_iter in range(schedule.num_outer_iters))]


def upcoming(schedule: Schedule, plan: Plan, job: int, num_workers: int, own: slice | None = None) -> tuple[WorkItem, ...]:
    """Return the work items that the worker of a job probably processes next.

    That is a later job of this outer iteration if there are more jobs than workers, else the job of
    the same number in the next one. `own` selects the jobs of one site, as in `next_plan`.
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
    planned = passes_by_outer_iter(schedule)
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
                progress.pending,
                layer_rates=progress.layer_rates, excluded=progress.bad_examples)
