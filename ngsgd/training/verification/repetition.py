"""Repetition of jobs of a finished or stopped run, and comparison with the counted results.

Initial states of the jobs are made from the ledger and the models on disk.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from ngsgd.errors import AuditError, CheckpointError, ConfigError
from ngsgd.interface import option
from ngsgd.optim.outer import make_rule
from ngsgd.schedules import OuterIteration, Schedule
from ngsgd.training.auditing.cases import work_done
from ngsgd.training.auditing.comparison import SMALLEST_OBJECTIVE, TOLERANCE
from ngsgd.training.averaging.averaged_model import AveragedModel
from ngsgd.training.job import Job, JobResult, WorkItem
from ngsgd.training.job_init import JobInitializer
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.planning import Plan, Progress
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage import audit
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, JobStates, first_checkpoint
from ngsgd.training.storage.ledger import pieces_of
from ngsgd.training.task import Task, seeded_model
from ngsgd.training.worker_pool import VectorRefcount, WorkerPool

Outcome = Literal["identical", "close", "differs", "not reproducible", "failed"]


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
        # otherwise jobs start from the model alone
        needs_checkpoint = (make_rule(self.settings.outer).buffers or self.settings.optimizer.keeps_curvature
                            or self.settings.failure.on_bad_batch == "quarantine")
        return outer_iter - 1 in self.store.outer_iters() or (not needs_checkpoint and outer_iter - 1 in self.store.kept())

    def jobs(self, outer_iter: int, wanted: Sequence[CountedJob], pool: WorkerPool) -> Iterator[tuple[CountedJob, Job]]:
        """Create jobs of an outer iteration; their model is freed at the end."""
        last = outer_iter - 1
        if outer_iter == 0:
            before = first_checkpoint(self.initial)
        elif last in self.store.outer_iters():
            before = self.store.load(self.store.directory / f"iter-{last:06d}")
        else:
            progress = Progress(last, wanted[0].passes_done)
            before = Checkpoint(progress, self.store.load_model(last), "")
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
        if states.excluded is not None:
            progress = replace(progress, bad_examples=states.excluded)
        start = pool.publish(averaged.optimizer.broadcast if states.model is None else partial(np.copyto, src=states.model))
        try:
            for one in wanted:
                shards = (one.pieces[0].shard,)
                iteration = OuterIteration(outer_iter, shards, one.passes_done, one.lr)
                plan = Plan(iteration, (one.pieces,), 1)
                yield one, Job(outer_iter, one.job, one.attempt, one.pieces, init.of(plan, one.job, start), one.lr, one.lr_factor,
                               min(1.0, one.passes_done / self.schedule.num_passes), init.returns, init.fragment(outer_iter),
                               self.settings.optimizer.keeps_curvature, init.need_own, progress.bad_examples)
        finally:
            pool.release(start)
            init.forget()


def require_any(jobs: Sequence[CountedJob], starts: Starts) -> list[CountedJob]:
    """Return the jobs that can run again; raise CheckpointError if there are none."""
    there = {outer_iter for outer_iter in {one.outer_iter for one in jobs} if starts.has(outer_iter)}
    found = [one for one in jobs if one.outer_iter in there and one.pieces]
    if not found:
        raise CheckpointError(f"{starts.store.directory.parent} has no counted job that can be repeated; resume the run, so that "
                              "it completes an outer iteration.")
    return found


@dataclass(frozen=True)
class Sample:
    """The number of jobs to repeat: a fraction of all counted jobs, or a count."""

    fraction: float = 0.0
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Parse "5%" or "20"; ConfigError if the text is neither, or not positive."""
        is_fraction = text.endswith("%")
        try:
            number = float(text[:-1]) / 100.0 if is_fraction else int(text)
        except ValueError:
            number = 0
        if not 0 < number < math.inf or (is_fraction and number > 1):
            raise ConfigError(f"{option('sample', '')} is {text}; give a percentage up to 100, such as 5%, or a number of jobs, "
                              "such as 20.")
        return cls(fraction=float(number)) if is_fraction else cls(count=int(number))

    def of(self, jobs: Sequence[CountedJob], num_counted: int, seed: int) -> list[CountedJob]:
        """Choose from the jobs that can be repeated; the fraction refers to all counted jobs."""
        wanted = self.count or math.ceil(self.fraction * num_counted)
        chosen = random.Random(seed).sample(range(len(jobs)), min(wanted, len(jobs)))
        return [jobs[index] for index in sorted(chosen)]


@dataclass(frozen=True)
class Check:
    """A repeated job."""

    job: CountedJob
    outcome: Outcome
    # relative difference of the objective, where bits may differ
    distance: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of `ngsgd verify`."""

    num_counted: int
    num_repeatable: int
    # differences of the numeric fingerprints; empty: compared bitwise
    differences: tuple[str, ...]
    checks: tuple[Check, ...]

    def count(self, outcome: Outcome) -> int:
        return sum(check.outcome == outcome for check in self.checks)

    def require_equal(self) -> None:
        """Raise AuditError, with the workers that gave other results, if a job differs."""
        if self.count("not reproducible"):
            one = next(check.job for check in self.checks if check.outcome == "not reproducible")
            raise AuditError(f"{_place(one)} gives another result each time on this machine, so nothing can be verified here; use "
                             "random numbers of the job's seed only, or check this machine (ngsgd doctor), and repeat.")
        wrong, checked = (Counter(check.job.worker for check in self.checks if not only or check.outcome == "differs")
                          for only in (True, False))
        if not wrong:
            return
        first = next(check.job for check in self.checks if check.outcome == "differs")
        counts = ", ".join(f"worker {worker} in {wrong[worker]} of {checked[worker]} jobs" for worker in sorted(wrong))
        all_differ = len(checked) > 1 and wrong == checked
        suspect = ("all workers differ, so this machine, its settings or the data have changed: repeat on another machine"
                   if all_differ else "check the machines of these workers, repeat on another machine, and train again from a "
                                      "model before the first difference")
        how = ("by more than rounding explains" if self.differences
               else "and this machine repeated each of them twice with the same result")
        raise AuditError(f"results that the run counted differ from those of this machine, {how}: {counts}; the first is "
                         f"{_place(first)}; {suspect}.")


def verify(jobs: Sequence[CountedJob], starts: Starts, pool: WorkerPool, objectives: Mapping[tuple[int, int], float], *,
           is_bitwise: bool, report: Callable[[Check], object]) -> list[Check]:
    """Repeat jobs on a started pool with one worker, and compare them.

    Compares bits if `is_bitwise`, else with a tolerance the objectives per frame that the run
    recorded, by outer iteration and job.
    """
    found: list[Check] = []
    for outer_iter, group in groupby(jobs, key=lambda one: one.outer_iter):
        wanted = list(group)
        try:
            for check in _check_all(outer_iter, wanted, starts, pool, objectives, is_bitwise=is_bitwise):
                found.append(check)
                report(check)
        except CheckpointError as error:
            for check in [Check(one, "failed", reason=str(error)) for one in wanted]:
                found.append(check)
                report(check)
    return found


def _check_all(outer_iter: int, wanted: Sequence[CountedJob], starts: Starts, pool: WorkerPool,
               objectives: Mapping[tuple[int, int], float], *, is_bitwise: bool) -> Iterator[Check]:
    for one, job in starts.jobs(outer_iter, wanted, pool):
        result = _run(job, pool)
        if is_bitwise and f"{result.digest:016x}" == one.digest:
            yield Check(one, "identical")
            continue
        if is_bitwise:
            again = _run(replace(job, attempt=job.attempt + 1), pool)
            yield Check(one, "differs" if again.digest == result.digest else "not reproducible")
            continue
        recorded = objectives.get((one.outer_iter, one.job))
        if recorded is None:
            yield Check(one, "failed", reason="events.jsonl holds no record of it")
            continue
        distance = abs(result.objf - recorded) / max(abs(recorded), SMALLEST_OBJECTIVE)
        yield Check(one, "close" if distance <= TOLERANCE else "differs", distance)


def _run(job: Job, pool: WorkerPool) -> JobResult:
    pool.submit(job)
    outcome = pool.wait(0.0)
    while outcome is None:
        outcome = pool.wait(1.0)
    if isinstance(outcome, JobResult):
        pool.release(outcome.sent)
        return outcome
    if outcome.error:
        raise outcome.error
    raise AuditError(f"job {job.job} of outer iteration {job.outer_iter + 1} could not be repeated ({outcome.reason}); check the "
                     "data and this machine, and repeat.")


def _place(one: CountedJob) -> str:
    return f"job {one.job} of outer iteration {one.outer_iter + 1}"
