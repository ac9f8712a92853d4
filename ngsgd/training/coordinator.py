"""The outer loop: plan, run the jobs, average, checkpoint, tell; plain Python over a WorkerPool.

One code path for one worker and a thousand.  Objective functions are per frame and go up.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn

from ngsgd.config import FailureConfig
from ngsgd.egs.reader import EgsReader
from ngsgd.errors import ClusterError, NgsgdError, RunInterrupted
from ngsgd.ops.averaging import weighted_mean
from ngsgd.schedules import OuterIteration, Schedule
from ngsgd.training.acceptance import judge, require_enough
from ngsgd.training.checkpoint import Checkpoint, CheckpointStore, Progress
from ngsgd.training.diagnostics import score_subset
from ngsgd.training.flat import Layout, Vector
from ngsgd.training.job import Job, JobFailure, JobResult
from ngsgd.training.ledger import Ledger
from ngsgd.training.pool import WorkerPool
from ngsgd.training.records import Incident, JobRecord, OuterIterationRecord
from ngsgd.training.tracking import Tracker

_POLL_S = 0.2  # how often a wish to stop is looked at while jobs run


class StopSignal(Protocol):
    """The user's or the cluster's wish that the run ends."""

    def requested(self) -> bool:
        """Finish the running outer iteration and stop."""

    def expired(self) -> bool:
        """Stop now: the time to finish is over."""


@dataclass
class Coordinator:
    """Runs the outer iterations of a schedule on a pool of workers."""

    schedule: Schedule
    pool: WorkerPool
    model: nn.Module           # the coordinator's own copy, for diagnostics
    reader: EgsReader
    checkpoints: CheckpointStore
    ledger: Ledger
    tracker: Tracker
    failure: FailureConfig
    stop: StopSignal

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.model)
        self.model.eval()  # no dropout in diagnostics
        self._subsets = {name: self.reader.diagnostic(name) for name in ("train", "valid")}
        self._num_deaths = 0

    def train(self, start: Checkpoint) -> Checkpoint:
        """All outer iterations after `start`; returns the last one committed.

        Raises RunInterrupted when asked to stop, DivergenceError or ClusterError when it cannot go on; whatever
        happens, the last committed outer iteration is on disk.
        """
        self._began = time.monotonic() - start.progress.elapsed_s
        here = start
        for plan in self.schedule.outer_iterations(first=start.progress.outer_iter + 1):
            if self.stop.requested():
                raise RunInterrupted(f"stopped before outer iteration {plan.outer_iter + 1}")
            here = self._outer_iteration(plan, here)
        return here

    def _outer_iteration(self, plan: OuterIteration, before: Checkpoint) -> Checkpoint:
        clock = _Clock()
        self.pool.broadcast(before.parameters)
        results = self._run_jobs(plan)
        compute_s = clock.lap()
        verdicts = judge(results, self.failure.objf_tolerance, self.reader.info.num_classes)
        for result, reason in verdicts:
            self.ledger.judged(result, reason)
            if reason:
                self._tell("job_rejected", f"job {result.job.job} of outer iteration {plan.outer_iter + 1}, on worker "
                           f"{result.worker}, was left out of the average: {reason}.", result.job, result.worker)
        accepted = [result for result, reason in verdicts if not reason]
        require_enough(accepted, verdicts, plan, self.failure.min_accepted)
        parameters = weighted_mean([r.parameters for r in accepted], [r.num_frames for r in accepted])
        average_s = clock.lap()
        frames = before.progress.frames_processed + sum(r.num_frames for r in accepted)
        progress = Progress(plan.outer_iter, frames, time.monotonic() - self._began)
        after = self.checkpoints.save(progress, parameters)
        self.ledger.committed(plan.outer_iter, frames, after.model_sha256)
        checkpoint_s = clock.lap()
        record = self._record(plan, before, after, verdicts)
        self.tracker.outer_iteration(replace(record, compute_s=compute_s, average_s=average_s,
                                             checkpoint_s=checkpoint_s, diagnostics_s=clock.lap()))
        return after

    def _run_jobs(self, plan: OuterIteration) -> list[JobResult]:
        """The results of a plan's jobs, in the order of the jobs; a job whose worker died is tried again."""
        self.ledger.planned(plan)
        waiting = deque(Job(plan.outer_iter, job, 1, shard, plan.lr, plan.num_jobs,
                            plan.passes_done / self.schedule.num_passes)
                        for job, shard in enumerate(plan.shards))
        results: list[JobResult] = []
        unsettled = plan.num_jobs
        while unsettled:
            while waiting and self.pool.num_idle():
                self.ledger.submitted(waiting[0])
                self.pool.submit(waiting.popleft())
            if self.stop.expired():
                self.pool.abandon()
                raise RunInterrupted(f"outer iteration {plan.outer_iter + 1} was given up")
            outcome = self.pool.wait(_POLL_S)
            if isinstance(outcome, JobResult):
                results.append(outcome)
                unsettled -= 1
            elif isinstance(outcome, JobFailure):
                again = self._after_failure(outcome)
                waiting.extend(again)
                unsettled -= not again
        # whoever finished first, the sum runs over the jobs in order
        return sorted(results, key=lambda result: result.job.job)

    def _after_failure(self, failure: JobFailure) -> list[Job]:
        """The job to try again, if any."""
        job = failure.job
        self.ledger.failed(failure)
        if isinstance(failure.error, NgsgdError):  # wrong data stay wrong however often they are read
            raise failure.error
        self._num_deaths += failure.worker_died
        who = f"worker {failure.worker} died ({failure.reason})" if failure.worker_died else \
            f"worker {failure.worker} failed ({failure.reason})"
        where = f"during job {job.job} of outer iteration {job.outer_iter + 1}, attempt {job.attempt}"
        if 0 <= self.failure.max_worker_deaths < self._num_deaths:
            raise ClusterError(f"{who} {where}, which is more deaths than failure.max_worker_deaths = "
                               f"{self.failure.max_worker_deaths} allows; the last checkpoint is whole.")
        if job.attempt < self.failure.max_attempts:
            self._tell("worker_died" if failure.worker_died else "job_failed",
                       f"{who} {where}; its shard runs again.", job, failure.worker)
            return [replace(job, attempt=job.attempt + 1)]
        self.ledger.dropped(job, failure.reason)
        self._tell("job_dropped", f"{who} {where}; archive {job.shard.archive}, frame {job.shard.frame} is left out of "
                   f"this outer iteration after {job.attempt} attempts.", job, failure.worker)
        return []

    def _record(self, plan: OuterIteration, before: Checkpoint, after: Checkpoint,
                verdicts: list[tuple[JobResult, str]]) -> OuterIterationRecord:
        self.layout.load(self.model, after.parameters)
        passes = plan.passes_done + plan.num_jobs
        per_epoch = self.schedule.num_archives * self.schedule.frames_per_eg
        elapsed_s = after.progress.elapsed_s
        # jobs weigh alike, so what is left goes with the passes, not with the outer iterations
        share = passes / max(self.schedule.num_passes, passes)
        left_s = elapsed_s * (1.0 - share) / share
        return OuterIterationRecord(
            outer_iter=plan.outer_iter, num_outer_iters=self.schedule.num_outer_iters, num_jobs=plan.num_jobs,
            num_accepted=sum(not reason for _, reason in verdicts), epoch=passes / per_epoch,
            num_epochs=self.schedule.num_epochs, frames_processed=after.progress.frames_processed,
            effective_lr=plan.effective_lr, lr=plan.lr, train=score_subset(self.model, self._subsets["train"]),
            valid=score_subset(self.model, self._subsets["valid"]),
            jobs=tuple(_job_record(result, reason) for result, reason in verdicts),
            relative_change=self.layout.relative_change(before.parameters, after.parameters),
            compute_s=0.0, average_s=0.0, checkpoint_s=0.0, diagnostics_s=0.0, elapsed_s=elapsed_s, left_s=left_s)

    def _tell(self, what: str, message: str, job: Job, worker: int) -> None:
        self.tracker.incident(Incident(what, message, job.outer_iter, job.job, worker))


class _Clock:
    """Seconds between two laps."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        last, self._last = self._last, time.monotonic()
        return self._last - last


def _job_record(result: JobResult, reason: str) -> JobRecord:
    return JobRecord(result.job.job, result.worker, result.job.attempt, result.num_frames, result.num_minibatches,
                     result.objf, result.accuracy, result.seconds, result.max_change_share,
                     result.max_param_change_share, result.num_skipped, not reason, reason, result.health)


def first_checkpoint(parameters: Vector) -> Checkpoint:
    """Where a new run starts."""
    return Checkpoint(Progress(-1, 0, 0.0), parameters, "")
