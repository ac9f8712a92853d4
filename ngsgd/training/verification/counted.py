"""The counted jobs of a run, and their initial states, from the ledger and the models on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ngsgd.errors import CheckpointError
from ngsgd.optim.outer import make_rule
from ngsgd.schedules import OuterIteration, Schedule
from ngsgd.training.auditing.cases import work_done
from ngsgd.training.averaging.averaged_model import AveragedModel
from ngsgd.training.job import Job, VectorRef, WorkItem
from ngsgd.training.job_init import JobInitializer
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.planning import Plan, Progress
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage import audit
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, first_checkpoint
from ngsgd.training.storage.job_states import JobStates
from ngsgd.training.storage.ledger import pieces_of
from ngsgd.training.task import Task, seeded_model
from ngsgd.training.worker_pool import VectorRefcount, WorkerPool


@dataclass(frozen=True)
class CountedJob:
    """A job whose result was accepted or rejected in a committed outer iteration."""

    outer_iter: int
    job: int
    attempt: int
    worker: int
    # work that the result contains
    pieces: tuple[WorkItem, ...]
    # checksum of the result, as its worker computed it
    digest: str
    lr: float
    lr_factor: float
    # passes over archives planned before its outer iteration
    passes_done: int


def counted_jobs(ledger: Path) -> list[CountedJob]:
    """Return the counted jobs of a run, in order."""
    found: list[CountedJob] = []
    passes = 0
    for one in audit.read(ledger) if ledger.is_file() else ():
        for entry in sorted(one.settled, key=lambda entry: int(entry["job"])):
            plan = one.planned.get(entry["job"])
            if plan and entry.get("digest"):
                pieces = work_done(pieces_of(entry["pieces"]), pieces_of(entry["left"]))
                found.append(CountedJob(entry["outer_iter"], entry["job"], entry["attempt"], entry["worker"], pieces,
                                        entry["digest"], plan["lr"], plan["lr_factor"], passes))
        passes += sum(piece.outer_iter == one.outer_iter for plan in one.planned.values() for piece in pieces_of(plan["pieces"])
                      if piece.first == 0)
    return found


@dataclass(frozen=True)
class Starts:
    """Initial states of the jobs of a run, from the models on disk."""

    task: Task
    settings: EngineSettings
    store: CheckpointStore
    schedule: Schedule
    # initial parameters of the run
    initial: Vector

    def has(self, outer_iter: int) -> bool:
        """Whether the jobs of an outer iteration can run again."""
        if outer_iter == 0:
            return True
        if self.settings.jobs_keep_state:
            # they also start from results of earlier jobs
            return self.store.has_jobs(outer_iter - 1)
        settings = self.settings
        # otherwise jobs start from the model alone
        needs_checkpoint = (make_rule(settings.outer).buffers or settings.keeps_fisher or settings.optimizer.equalize_layers
                            or settings.failure.on_bad_batch == "quarantine")
        return outer_iter - 1 in self.store.outer_iters() or (not needs_checkpoint and outer_iter - 1 in self.store.kept())

    def jobs(self, outer_iter: int, wanted: Sequence[CountedJob], pool: WorkerPool) -> Iterator[tuple[CountedJob, Job]]:
        """Create jobs of an outer iteration; their model is freed at the end.

        Raises:
            CheckpointError: the model is damaged.
        """
        before = self._before(outer_iter, wanted[0].passes_done)
        model = seeded_model(self.task, self.settings.seed)
        averaged = AveragedModel(self.task, model, self.settings, self.store, self.schedule.num_outer_iters)
        averaged.begin(before)
        init = JobInitializer(self.settings.outer, VectorRefcount(pool), codec=self.settings.cluster.codec,
                              mean_fisher=self.settings.mean_fisher)
        init.fisher.update(before.fisher)
        progress, states = before.progress, self.store.load_jobs(before) if before.has_jobs else JobStates()
        init.restore(progress.outer_iter, states)
        if averaged.enter(outer_iter):
            init.forget()
        if states.layer_rates is not None and states.excluded is not None:
            progress = replace(progress, layer_rates=states.layer_rates, bad_examples=states.excluded)
        start = pool.publish(averaged.optimizer.broadcast if states.model is None else partial(np.copyto, src=states.model))
        try:
            for one in wanted:
                yield one, self._job(one, progress, init, start)
        finally:
            pool.release(start)
            init.forget()

    def _before(self, outer_iter: int, passes_done: int) -> Checkpoint:
        """The checkpoint that an outer iteration started from."""
        if outer_iter == 0:
            return first_checkpoint(self.initial)
        if outer_iter - 1 in self.store.outer_iters():
            return self.store.load(self.store.directory / f"iter-{outer_iter - 1:06d}")
        return Checkpoint(Progress(outer_iter - 1, passes_done), self.store.load_model(outer_iter - 1), "")

    def _job(self, one: CountedJob, before: Progress, init: JobInitializer, start: VectorRef) -> Job:
        iteration = OuterIteration(one.outer_iter, (one.pieces[0].shard,), one.passes_done, one.lr)
        plan = Plan(iteration, (one.pieces,), 1)
        return Job(one.outer_iter, one.job, one.attempt, one.pieces, init.of(plan, one.job, start), one.lr, one.lr_factor,
                   progress=min(1.0, one.passes_done / self.schedule.num_passes), returns=init.returns,
                   send=init.fragment(one.outer_iter), keep_own=init.need_own, keep_fisher=self.settings.keeps_fisher,
                   layer_rates=before.layer_rates, excluded=before.bad_examples)


def require_any(jobs: Sequence[CountedJob], starts: Starts) -> list[CountedJob]:
    """Return the jobs that can run again.

    Raises:
        CheckpointError: there are none.
    """
    there = {outer_iter for outer_iter in {one.outer_iter for one in jobs} if starts.has(outer_iter)}
    found = [one for one in jobs if one.outer_iter in there and one.pieces]
    if not found:
        raise CheckpointError(f"{starts.store.directory.parent} has no counted job that can be repeated; resume the run, so that "
                              "it completes an outer iteration.")
    return found
