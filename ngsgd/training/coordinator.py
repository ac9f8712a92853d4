"""The outer loop over a WorkerPool: plan, run the jobs, average, checkpoint, report.

The same code serves one worker and a thousand. Objective functions are per example; higher is
better. With `outer.overlap` each job of the next outer iteration starts as soon as its predecessor
ends, before the average is computed. It starts from the previous model plus the parameter delta of
its predecessor, so it trains on a model that is one outer iteration old.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import nn

from ngsgd.errors import DivergenceError, FailureKind, NgsgdError, RunInterrupted
from ngsgd.schedules import Schedule
from ngsgd.training.averaging.averaged_model import AveragedModel
from ngsgd.training.averaging.averager import Averager, has_no_data, message_without_data
from ngsgd.training.diagnostics.deferred import DeferredDiagnostics
from ngsgd.training.dispatcher import Dispatcher, NeverStop, OuterIterationState, StopSignal
from ngsgd.training.job import Job, JobResult
from ngsgd.training.job_init import JobInitializer
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.planning import Plan, Progress, make_partitioner, next_plan, upcoming
from ngsgd.training.records import Incident, JobRecord, OuterIterationRecord, SubsetScore, Tracker
from ngsgd.training.settings import EngineSettings
from ngsgd.training.sites.site_average import SiteAverage
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, with_sites
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.task import Task
from ngsgd.training.validation import bad_batches
from ngsgd.training.validation.acceptance import MIN_ACCEPTED_FRACTION, Verdicts
from ngsgd.training.worker_pool import WorkerPool

# maximum consecutive roll-backs of an outer iteration; three halve the learning rate eightfold
MAX_ROLLBACKS = 3
_UNKNOWN = SubsetScore(math.nan, math.nan)


@dataclass(frozen=True)
class RunStorage:
    """Storage of a run: checkpoints, the write-ahead ledger, and the trackers."""

    checkpoints: CheckpointStore
    ledger: Ledger
    tracker: Tracker


@dataclass(frozen=True)
class RunControl:
    """External inputs of a run, and where it reports its progress."""

    stop: StopSignal = field(default_factory=NeverStop)
    clock: Callable[[], float] = time.monotonic
    # takes lines of progress
    report: Callable[[str], object] = lambda _line: None


@dataclass
class Coordinator:
    """Runs the outer iterations of a schedule on a pool of workers."""

    task: Task
    # model of the task: defines the layout, and is a workspace for evaluation
    model: nn.Module
    schedule: Schedule
    pool: WorkerPool
    storage: RunStorage
    settings: EngineSettings = field(default_factory=EngineSettings)
    control: RunControl = field(default_factory=RunControl)
    # averages over sites; None for a run of one site
    sites: SiteAverage | None = None

    def __post_init__(self) -> None:
        settings, ledger, tracker = self.settings, self.storage.ledger, self.storage.tracker
        self._partitioner = make_partitioner(settings.schedule, self.task.num_batches)
        self._averaged = AveragedModel(self.task, self.model, settings, self.storage.checkpoints, self.schedule.num_outer_iters)
        self._deferred = DeferredDiagnostics(self.model, self.task, tracker.outer_iteration)
        self._dispatch = Dispatcher(self.pool, ledger, self._averaged.layout, settings,
                                    self.control.stop, self._emit_incident, self.control.clock, self.control.report)
        self._refcount = self._dispatch.refcount
        self._job_init = JobInitializer(settings.outer, self._refcount, codec=settings.cluster.codec,
                                        mean_fisher=settings.mean_fisher)
        self._averager = Averager(self.task, self.model, self._averaged, self._dispatch, self._job_init)
        self._num_rollbacks = 0    # consecutive
        # time of the last lap
        self._lap_began_s = 0.0

    def train(self, start: Checkpoint) -> Checkpoint:
        """Run all outer iterations after `start` and return the last one committed to disk.

        Raises RunInterrupted if a stop was requested, else DivergenceError or ClusterError.
        """
        try:
            return self._train(start)
        finally:
            try:
                self._deferred.wait()
            finally:
                self._deferred.close()

    def _train(self, start: Checkpoint) -> Checkpoint:
        start = here = self._resume(start)
        state = self._open_first(start)
        self._enqueue_jobs(state, None)
        while state:
            if self.control.stop.requested():
                raise RunInterrupted(f"stopped before outer iteration {state.plan.outer_iter + 1}")
            ahead = None
            if self._job_init.are_ahead:
                ahead = self._open(_after(state.plan, here.progress))
            self._lap()
            self._dispatch.finish(state, ahead, partial(self._while_jobs_run, ahead, state))
            after = self._close(state, here, ahead)
            if after.progress.outer_iter == here.progress.outer_iter:
                # rolled back, together with the jobs that started from its results
                if ahead:
                    self._dispatch.drain(ahead)
                    self._release(ahead)
                self._job_init.forget()
                ahead = None
            here = after
            state = ahead or self._open(here.progress)
            self._enqueue_jobs(state, None)
        return here

    def _lap(self) -> float:
        last, self._lap_began_s = self._lap_began_s, self.control.clock()
        return self._lap_began_s - last

    def _resume(self, start: Checkpoint) -> Checkpoint:
        """Restore state and lost records; a new run may get the parameters of another site."""
        self._began = self.control.clock() - start.progress.elapsed_s
        if self.sites:
            start = self.sites.begin(start)
        self._averaged.begin(start)
        self._job_init.fisher.update(start.fisher)
        self.storage.ledger.started(start.progress.outer_iter, MIN_ACCEPTED_FRACTION)
        # a crash may have occurred before the commit was written to the ledger or the event log
        if start.commit:
            self.storage.ledger.committed(start.commit)
        if start.record:
            self._deferred.add(start.record, partial(self._averaged.load, start))
        return start

    def _open_first(self, start: Checkpoint) -> OuterIterationState | None:
        """Plan the first outer iteration of this process, as the process before it did."""
        if not start.has_jobs:
            return self._open(start.progress)
        states = self.storage.checkpoints.load_jobs(start)
        self._job_init.restore(start.progress.outer_iter, states)
        progress = start.progress
        if states.excluded is not None:
            progress = replace(progress, bad_examples=states.excluded)
        return self._open(progress, states.model)

    def _open(self, progress: Progress, model_before: Vector | None = None) -> OuterIterationState | None:
        """Plan an outer iteration from the current model or `model_before`; None at the end."""
        capacity = max(1, self.pool.num_workers_alive()) if self.settings.cluster.elastic else None
        plan = next_plan(self.schedule, progress, self._partitioner, max_jobs=capacity, own=self.settings.sites.own_jobs)
        if plan is None:
            return None
        if self._averaged.enter(plan.outer_iter):
            # they belong to other layers, or to other parameters of these layers
            self._job_init.forget()
        gain = (self.sites.gain if self.sites else
                self._averaged.optimizer.rule.gain(plan.num_jobs, self.schedule.num_outer_iters))
        plan = replace(plan, iteration=replace(plan.iteration, gain=gain))
        model = self.pool.publish(self._averaged.optimizer.broadcast if model_before is None
                                  else partial(np.copyto, src=model_before))
        self._refcount.acquire(model)
        return self._dispatch.open(plan, model, progress.quarantined, self._partitioner.round_s)

    def _while_jobs_run(self, ahead: OuterIterationState | None, state: OuterIterationState) -> None:
        self._deferred.report_finished()
        self._enqueue_jobs(ahead, state)

    def _enqueue_jobs(self, state: OuterIterationState | None, predecessor: OuterIterationState | None) -> None:
        """Create the jobs of an outer iteration, except those whose predecessors still run."""
        for job in sorted(state.to_come) if state else ():
            if predecessor is None or job not in predecessor.unsettled:
                assert state is not None
                if predecessor is not None:
                    self._job_init.remember(job, predecessor)
                self._dispatch.enqueue(state, self._job(state, job))

    def _job(self, state: OuterIterationState, job: int) -> Job:
        plan, iteration = state.plan, state.plan.iteration
        return Job(plan.outer_iter, job, 1, plan.work[job], self._job_init.of(plan, job, state.model), iteration.lr,
                   iteration.lr_factor, progress=min(1.0, iteration.passes_done / self.schedule.num_passes),
                   returns=self._job_init.returns, send=self._job_init.fragment(plan.outer_iter),
                   keep_own=self._job_init.need_own, keep_fisher=self.settings.optimizer.keeps_curvature, excluded=plan.excluded,
                   upcoming=upcoming(self.schedule, plan, job, self.settings.cluster.num_workers, self.settings.sites.own_jobs))

    def _close(self, state: OuterIterationState, before: Checkpoint, ahead: OuterIterationState | None) -> Checkpoint:
        """Average and commit a completed outer iteration; return `before` after a roll-back."""
        compute_s = self._lap()
        verdicts, error = self._averager.average(state, before)
        self._record_verdicts(state, verdicts)
        if error:
            self._release(state)
            return self._rolled_back(state.plan, before, error)
        if has_no_data(state, before.progress):
            self._emit_incident(Incident("outer_iteration_skipped", message_without_data(state, self.schedule),
                                         state.plan.outer_iter))
        accepted = [result for result, reason in verdicts if not reason]
        self._partitioner.observe(accepted)
        for job in range(state.plan.num_jobs):
            self._job_init.remember(job, state)
        of_sites = self._average_sites(state.plan)
        average_s = self._lap()
        # write the event of the previous commit before its checkpoint, its other source, is removed
        self._deferred.wait()
        diagnostics_s = self._lap()
        progress = self._progress(state, before.progress, accepted)
        record = replace(self._record(state, progress, verdicts), compute_s=compute_s,
                         sites=of_sites, average_s=average_s, diagnostics_s=diagnostics_s)
        after = self._commit(state, before, progress, record, ahead)
        self._release(state)
        record = replace(record, checkpoint_s=self._lap())
        self._deferred.add(record, partial(self._averaged.load, after))
        return after

    def _average_sites(self, plan: Plan) -> dict[str, float]:
        """Average with the other sites if it is time; return figures of it."""
        if self.sites is None:
            return {}
        self.sites.report = lambda event: self._emit_incident(Incident(event.what, event.message, plan.outer_iter))
        figures = self.sites.average(self._averaged.parameters(), plan.outer_iter, plan.iteration.lr)
        if figures:
            self._averager.take(self._averaged.parameters(), f"the average over sites, round {self.sites.round},")
        return figures

    def _record_verdicts(self, state: OuterIterationState, verdicts: Verdicts) -> None:
        for result, reason in verdicts:
            self.storage.ledger.judged(result, reason)
            outer_iter, job = state.plan.outer_iter, result.job.job
            for bad in result.bad_batches:
                message = bad_batches.message(bad, job, outer_iter, result.worker, self.settings.failure.on_bad_batch)
                kind = FailureKind.BAD_INPUT if bad.reason == bad_batches.INPUT else FailureKind.UNKNOWN
                self._emit_incident(Incident("bad_batch", message, outer_iter, job, result.worker, kind=kind))
            if not reason:
                continue
            # no later job starts from a rejected result
            state.rejection_reasons[result.job.job] = reason
            self._emit_incident(Incident("job_rejected", f"job {job} of outer iteration {outer_iter + 1}, on worker "
                                         f"{result.worker}, was rejected: {reason}.", outer_iter, job, result.worker))

    def _progress(self, state: OuterIterationState, old: Progress, accepted: list[JobResult]) -> Progress:
        """Return the state of the run after the commit of this outer iteration."""
        progress = _after(state.plan, old)
        progress = replace(progress, frames_processed=old.frames_processed + sum(r.num_frames for r in accepted),
                           elapsed_s=self.control.clock() - self._began, quarantined=(*old.quarantined, *state.quarantined),
                           pending=(*progress.pending, *state.deferred))
        if self.settings.failure.on_bad_batch == "quarantine":
            found = {name for result in state.results.values() for bad in result.bad_batches for name in bad.examples}
            progress = replace(progress, bad_examples=tuple(sorted({*old.bad_examples, *found})))
        return progress

    def _commit(self, state: OuterIterationState, before: Checkpoint, progress: Progress,
                record: OuterIterationRecord, ahead: OuterIterationState | None) -> Checkpoint:
        # write-ahead: fsync the ledger before the checkpoint that refers to it
        self.storage.ledger.sync()
        self._num_rollbacks = 0
        outer_state = self._averaged.optimizer.state_dict()
        if self.sites:
            outer_state = with_sites(outer_state, self.sites.state_dict())
        store, jobs = self.storage.checkpoints, None
        is_last = self.control.stop.requested() or progress.passes_done >= self.schedule.num_passes
        if store.wants_jobs(progress.outer_iter) or is_last:
            jobs = self._job_init.states(progress.outer_iter, ahead)
        after = store.save(progress, outer_state, {
            "outer_iter": progress.outer_iter, "frames_processed": progress.frames_processed,
            "parent": before.model_sha256, "num_accepted": record.num_accepted,
            "numbers": {"lr": state.plan.iteration.lr, **outer_state["numbers"]}},
            fisher=self._job_init.fisher, record=record, jobs=jobs)
        self.storage.ledger.committed(after.commit)
        return after

    def _rolled_back(self, plan: Plan, before: Checkpoint, error: NgsgdError) -> Checkpoint:
        if self.settings.failure.on_divergence == "stop" or not isinstance(error, DivergenceError):
            raise error
        self._num_rollbacks += 1
        if self._num_rollbacks > MAX_ROLLBACKS:
            raise DivergenceError(f"outer iteration {plan.outer_iter + 1} failed again after {MAX_ROLLBACKS} roll-backs; "
                                  "lower schedule.lr_initial and resume, or restart.") from error
        lr_scale = before.progress.lr_scale / 2
        self.storage.ledger.rolled_back(plan.outer_iter, str(error), lr_scale)
        self._emit_incident(Incident("rolled_back", f"outer iteration {plan.outer_iter + 1} is repeated from the last model "
                                     f"with {lr_scale:g} times the learning rate: {error}", plan.outer_iter))
        return replace(before, progress=replace(before.progress, lr_scale=lr_scale))

    def _release(self, state: OuterIterationState) -> None:
        """Release the vectors that only this outer iteration needed."""
        for result in state.results.values():
            self._refcount.release_if_unused(result.sent)
            self._refcount.release_if_unused(result.own)
        self._refcount.release(state.model)

    def _record(self, state: OuterIterationState, progress: Progress, verdicts: Verdicts) -> OuterIterationRecord:
        plan, iteration = state.plan, state.plan.iteration
        passes, elapsed_s = progress.passes_done, progress.elapsed_s
        per_epoch = self.schedule.num_archives * self.schedule.frames_per_eg
        # jobs have equal weight, so the time left is proportional to passes, not outer iterations
        share = passes / max(self.schedule.num_passes, passes)
        jobs = tuple(_job_record(result, reason, state.arrived_s.get(result.job.job, 0.0) - self._began)
                     for result, reason in verdicts)
        return OuterIterationRecord(
            outer_iter=plan.outer_iter, num_outer_iters=max(self.schedule.num_outer_iters, plan.outer_iter + 1),
            num_jobs=plan.num_jobs, num_accepted=sum(not reason for _, reason in verdicts), epoch=passes / per_epoch,
            num_epochs=self.schedule.num_epochs, frames_processed=progress.frames_processed,
            effective_lr=iteration.effective_lr, lr=iteration.lr, gain=iteration.gain, train=_UNKNOWN, valid=_UNKNOWN, jobs=jobs,
            relative_change=self._averaged.layout.relative_change(state.model.read(), self._averaged.parameters()),
            compute_s=0.0, average_s=0.0, checkpoint_s=0.0, diagnostics_s=0.0, elapsed_s=elapsed_s,
            left_s=elapsed_s * (1.0 - share) / share, patience_s=self._dispatch.hang_timeout_s(),
            workers_alive=self.pool.num_workers_alive(), num_deaths=self._dispatch.num_deaths,
            num_discarded=self._dispatch.num_discarded, num_deferred=len(state.deferred),
            num_audited=self._dispatch.audits.num_audited.pop(plan.outer_iter, 0))

    def _emit_incident(self, incident: Incident) -> None:
        self.storage.tracker.incident(replace(incident, elapsed_s=self.control.clock() - self._began))


def _after(plan: Plan, before: Progress) -> Progress:
    """Return the progress after `plan`, with the fields that the next plan depends on."""
    # a plan consumes work deferred before it was made; later deferrals belong to the next plan
    return replace(before, outer_iter=plan.outer_iter, passes_done=plan.iteration.passes_done + plan.num_fresh,
                   pending=tuple(piece for piece in before.pending if piece not in plan.taken_up))


def _job_record(result: JobResult, reason: str, ended_s: float) -> JobRecord:
    return JobRecord(result.job.job, result.worker, result.job.attempt, result.num_frames,
                     result.num_minibatches, result.objf, result.accuracy, result.seconds,
                     result.max_change_share, result.max_param_change_share, result.num_skipped,
                     not reason, reason, result.health, ended_s, result.host, result.machine,
                     bad_batches.examples_of(result.bad_batches), result.continued_at)
