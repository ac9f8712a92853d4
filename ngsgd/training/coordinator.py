"""The outer loop: plan, run the jobs, average, checkpoint, tell; plain Python over a WorkerPool.

One code path for one worker and a thousand.  Objective functions are per frame and go up.  With `outer.overlap` the jobs of
the next outer iteration begin, each as soon as its predecessor has ended, before the average is there: they start from the
model before plus their own move, so a model is one outer iteration old where it is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from torch import nn

from ngsgd.config import ClusterConfig, FailureConfig, ObjectiveConfig, OuterConfig
from ngsgd.data.reader import EgsReader
from ngsgd.errors import DivergenceError, NgsgdError, RunInterrupted
from ngsgd.models.growing import StagedModel, set_stage
from ngsgd.models.growth_stages import Stage, Stages
from ngsgd.ops.averaging import pool_variances
from ngsgd.optim.outer import OuterInfo, OuterOptimizer, make_rule
from ngsgd.schedules import Schedule
from ngsgd.training.diagnostics.deferred import PendingRecords
from ngsgd.training.diagnostics.subset_scores import BackgroundDiagnostics
from ngsgd.training.dispatcher import Dispatcher, Round, StopSignal
from ngsgd.training.job import Fisher, Job, JobResult, ResultsLost, VectorRef
from ngsgd.training.job_init import Starts
from ngsgd.training.layer_rates import equalised
from ngsgd.training.parameter_vector import Layout, Mean, Vector
from ngsgd.training.partitioning import EqualShares
from ngsgd.training.planning import Plan, Progress, next_plan
from ngsgd.training.records import Incident, JobRecord, OuterIterationRecord, SubsetScore
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.tracking import Tracker
from ngsgd.training.validation.acceptance import NOT_THE_BEST, Verdicts, best_alone, judge, too_few
from ngsgd.training.validation.checksums import is_finite
from ngsgd.training.validation.held_out_check import HeldOutCheck
from ngsgd.training.validation.plausibility import disagrees
from ngsgd.training.vector_refcount import Leases
from ngsgd.training.worker import starting_point
from ngsgd.training.worker_pool import WorkerPool

_UNKNOWN = SubsetScore(math.nan, math.nan)  # until the diagnostics have ended


@dataclass
class Coordinator:
    """Runs the outer iterations of a schedule on a pool of workers."""

    schedule: Schedule
    pool: WorkerPool
    model: nn.Module           # gives the layout, and diagnostics a copy to work in
    reader: EgsReader
    checkpoints: CheckpointStore
    ledger: Ledger
    tracker: Tracker
    failure: FailureConfig
    stop: StopSignal
    outer: OuterConfig = field(default_factory=OuterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    dealer: EqualShares = field(default_factory=EqualShares)
    keep_fisher: bool = False  # a job's successor goes on from its Fisher estimates
    mean_fisher: Callable[[Sequence[Fisher]], Fisher] | None = None  # or every job from this mean of all jobs'
    stages: Stages = field(default_factory=Stages)  # what of the model is in use, by outer iteration
    seed: int = 0              # the run's; with the stage it decides what new parts of the model start as
    num_threads: int = 1       # for averaging
    clock: Callable[[], float] = time.monotonic
    num_curvature_frames: int = 0  # of the train subset, for gradient noise and curvature by layer; 0: none
    on_corrupt: str = "stop"   # for an archive that is damaged: stop or quarantine
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)  # whether layers' rates are made to follow

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.model)
        self._stage = self.stages.at(-1)
        subsets = {name: self.reader.diagnostic(name) for name in ("train", "valid")}
        diagnostics = BackgroundDiagnostics(
            self.model, subsets, self.reader.info.silence_classes, self.num_curvature_frames)
        self._held_out = HeldOutCheck(
            self.model, self.layout, subsets["valid"], self.reader.info.num_classes,
            self.failure.objf_tolerance, is_frame_wise=self.objective.kind == "ce")
        self._records = PendingRecords(diagnostics, self.tracker.outer_iteration)
        self._dispatch = Dispatcher(self.pool, self.ledger, self.layout, self.failure, self.cluster, self.stop, self._tell,
                                    self.clock, self.on_corrupt)
        self._leases = Leases(self.pool)
        self._num_rollbacks = 0    # in a row
        self._starts = Starts(self.outer, self._leases, keep_fisher=self.keep_fisher, mean_fisher=self.mean_fisher)

    def train(self, start: Checkpoint) -> Checkpoint:
        """All outer iterations after `start`; returns the last one committed.

        Raises RunInterrupted when asked to stop, DivergenceError or ClusterError when it cannot go on; whatever
        happens, the last committed outer iteration is on disk.
        """
        try:
            return self._train(start)
        finally:
            try:
                self._records.wait()
            finally:
                self._records.diagnostics.close()

    def _train(self, start: Checkpoint) -> Checkpoint:
        self._began = self.clock() - start.progress.elapsed_s
        self.optimizer = self._new_optimizer(start)
        if start.model_sha256:
            self.optimizer.load_state_dict(start.outer_state())
        self._starts.fisher.update(start.fisher)
        self._stage = self.stages.at(start.progress.outer_iter)
        self.ledger.started(start.progress.outer_iter, self.failure.min_accepted)
        if start.commit:  # a crash may have come between the checkpoint and its line
            self.ledger.committed(start.commit)
        if start.record:  # a crash may have come between the checkpoint and its event
            self._records.add(start.record, partial(self._load, start))
        here = start
        round_ = self._open(here.progress)
        self._make_jobs(round_, None)
        while round_:
            if self.stop.requested():
                raise RunInterrupted(f"stopped before outer iteration {round_.plan.outer_iter + 1}")
            ahead = self._open(_after(round_.plan, here.progress)) if self._starts.are_ahead else None
            clock = _Clock(self.clock)
            self._dispatch.finish(round_, ahead, partial(self._meanwhile, ahead, round_))
            after = self._close(round_, here, clock)
            if after.progress.outer_iter == here.progress.outer_iter:  # rolled back, and what was built on it with it
                self._forget(ahead)
                ahead = None
            here = after
            round_ = ahead or self._open(here.progress)
            self._make_jobs(round_, None)
        return here

    # Opening ----------------------------------------------------------------------------------------------------------

    def _open(self, progress: Progress) -> Round | None:
        """Plans the outer iteration that follows; None when the data has been processed."""
        capacity = max(1, self.pool.num_workers_alive()) if self.cluster.elastic else None
        plan = next_plan(self.schedule, progress, self.dealer, max_jobs=capacity)
        if plan is None:
            return None
        self._enter(self.stages.at(plan.outer_iter))
        gain = self.optimizer.rule.gain(plan.num_jobs, self.schedule.num_outer_iters)
        plan = replace(plan, iteration=replace(plan.iteration, gain=gain), keeps_best=self.stages.is_early(plan.outer_iter))
        model = self.pool.publish(self.optimizer.broadcast)
        self._leases.take(model)
        return self._dispatch.open(plan, model, progress.quarantined, self.dealer.round_s)

    def _load(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        """Makes a model that of the checkpoint."""
        set_stage(model, self.stages.at(checkpoint.progress.outer_iter))
        self.layout.load(model, checkpoint.parameters)

    def _meanwhile(self, ahead: Round | None, round_: Round) -> None:
        """What there is to do while jobs run."""
        self._records.look()
        self._make_jobs(ahead, round_)

    def _enter(self, stage: Stage) -> None:
        """Makes the parts of the model that a new stage brings: a function of the last checkpoint, so a resumed run makes them too.

        Once for each stage: an outer iteration that is rolled back runs again with what was made for it.
        """
        if stage == self._stage:
            return
        self._remake(stage)
        self._starts.fisher.clear()  # estimates of other layers, or of what these layers were before

    def _remake(self, stage: Stage) -> None:
        assert isinstance(self.model, StagedModel)
        state = self.layout.unflatten(self.optimizer.eval_model())
        for name, values in self.model.remade(state, self._stage, stage, self.seed).items():
            self.optimizer.put(self.layout.part(name), values.numpy().reshape(-1))
        self._stage = stage

    def _make_jobs(self, round_: Round | None, predecessor: Round | None) -> None:
        """Makes those jobs of an outer iteration that can be run: all, but for those whose predecessor still runs."""
        for job in sorted(round_.to_come) if round_ else ():
            if predecessor is None or job not in predecessor.unsettled:
                assert round_ is not None
                if predecessor is not None:
                    self._starts.remember(job, predecessor)
                self._dispatch.enqueue(round_, self._job(round_.plan, job, round_.model))

    def _job(self, plan: Plan, job: int, model: VectorRef) -> Job:
        iteration = plan.iteration
        done = min(1.0, iteration.passes_done / self.schedule.num_passes)
        return Job(plan.outer_iter, job, 1, plan.work[job], self._starts.of(plan, job, model), iteration.lr, iteration.lr_factor,
                   done, returns=self._starts.returns, send=self._starts.fragment(plan.outer_iter),
                   keep_own=self._starts.need_own, keep_fisher=self.keep_fisher, layer_rates=plan.layer_rates)

    # Closing ----------------------------------------------------------------------------------------------------------

    def _close(self, round_: Round, before: Checkpoint, clock: _Clock) -> Checkpoint:
        """Averages and commits an outer iteration whose jobs are settled; returns `before` if it had to be rolled back."""
        compute_s = clock.lap()
        plan = round_.plan
        verdicts, error = self._average(round_, before)
        for result, reason in verdicts:
            self.ledger.judged(result, reason)
            if reason:
                round_.troubles[result.job.job] = reason  # nothing of it is gone on from
            if reason and reason != NOT_THE_BEST:
                self._tell("job_rejected", f"job {result.job.job} of outer iteration {plan.outer_iter + 1}, on worker "
                           f"{result.worker}, was left out of the average: {reason}.", plan.outer_iter, result.job.job,
                           result.worker)
        accepted = [result for result, reason in verdicts if not reason]
        if error:
            self._end(round_)
            return self._rolled_back(plan, before, error)
        self.dealer.observe(accepted)
        for job in range(plan.num_jobs):
            self._starts.remember(job, round_)
        average_s = clock.lap()
        # the event of the commit before is on disk before its checkpoint, which could restore it, may be removed
        self._records.wait()
        diagnostics_s = clock.lap()
        progress = self._progress(round_, before.progress, accepted)
        record = replace(self._record(round_, progress, verdicts), compute_s=compute_s, average_s=average_s,
                         diagnostics_s=diagnostics_s)
        after = self._commit(round_, before, progress, record)
        self._end(round_)
        self._records.add(replace(record, checkpoint_s=clock.lap()), partial(self._load, after))
        return after

    def _average(self, round_: Round, before: Checkpoint) -> tuple[Verdicts, NgsgdError | None]:
        """Makes the next model of the plausible results; with an error the model stays `before`.

        The new model is scored on a few held-out frames before it is committed.  If it is worse
        than the one before, each result is scored alone, and the outer step is taken back and
        repeated without those found to be bad.
        """
        stage = self.stages.at(round_.plan.outer_iter)
        self._held_out.begin(self.optimizer.eval_model(), stage)
        while True:
            gathered = self._gather(round_)
            if gathered.error:
                return gathered.verdicts, gathered.error
            accepted = [result for result, reason in gathered.verdicts if not reason]
            self._step(round_.plan, len(accepted), gathered.vectors, gathered.weights)
            try:
                bad, error = self._checked(round_, accepted)
            except ResultsLost as lost:
                self._restore(before)
                self._run_again(round_, lost)
                continue
            if not bad and not error:
                return gathered.verdicts, None
            self._restore(before)
            if error:
                return gathered.verdicts, error
            round_.troubles |= bad

    def _checked(self, round_: Round, accepted: Sequence[JobResult]
                 ) -> tuple[dict[int, str], DivergenceError | None]:
        """(by job: why it is rejected after all, why nothing can be committed) of the new model."""
        model = self.optimizer.eval_model()
        is_sound = is_finite(model)
        objf = self._held_out.score(model) if is_sound else -math.inf
        is_expensive = not all(result.sent.is_here for result in accepted)
        is_suspect = self._held_out.is_suspect(objf, is_expensive=is_expensive)
        bad = self._bad_ones(round_, accepted) if is_suspect else {}
        failure = self._held_out.failure(objf)
        if bad:
            return bad, None
        number = round_.plan.outer_iter + 1
        if not is_sound:
            return {}, DivergenceError(
                f"the model of outer iteration {number} is not finite, though its jobs' are: "
                f"outer.kind={self.outer.kind} diverged; lower its gain and resume.")
        if failure:
            return {}, DivergenceError(
                f"the average of outer iteration {number} is not committed: {failure}, though no "
                "single result explains it; lower schedule.lr_initial and resume, or start again.")
        self._held_out.commit(objf)
        return {}, None

    def _gather(self, round_: Round) -> _Gathered:
        """What each result is worth, and what is to be averaged; results that are lost on the way are made again."""
        while True:
            verdicts, is_contested = judge(
                round_.in_order(), round_.troubles, self.failure.objf_tolerance,
                self.reader.info.num_classes, self.layout)
            accepted = [result for result, reason in verdicts if not reason]
            weights: list[float] = [result.num_frames for result in accepted]
            error = too_few(accepted, verdicts, round_.plan, self.failure.min_accepted)
            if error:
                return _Gathered(verdicts, error, [], [])
            if round_.plan.keeps_best:
                verdicts = best_alone(verdicts)
                accepted = [result for result, reason in verdicts if not reason]
                weights = [1.0]
            try:
                if is_contested and (bad := self._bad_ones(round_, accepted)):
                    round_.troubles |= bad
                    continue
                # a rule that needs every vector, such as a median, must not be given the workers' mean instead
                mean = self.pool.mean(accepted, weights) if self.optimizer.takes_mean else None
                if mean is not None:
                    return _Gathered(verdicts, None, [mean], [1.0])
                return _Gathered(verdicts, None, [result.sent.read() for result in accepted], weights)
            except ResultsLost as lost:  # nothing of this outer iteration has been counted yet
                self._run_again(round_, lost)

    def _run_again(self, round_: Round, lost: ResultsLost) -> None:
        self._dispatch.take_back(round_, lost.failures)
        self._dispatch.finish(round_, None, lambda: None)

    def _bad_ones(self, round_: Round, accepted: Sequence[JobResult]) -> dict[int, str]:
        """By job: why it is rejected, with each result scored alone on held-out frames.

        Where parameter deltas disagree, the result with the best score is trusted.
        """
        scores = {result.job.job: self._held_out.score(self._parameters_of(result, round_))
                  for result in accepted}
        best = max(accepted, key=lambda result: scores[result.job.job])
        found = self._held_out.judge(scores)
        for result in accepted:
            job, reason = result.job.job, disagrees(result, best, self.layout)
            if reason and scores[job] < scores[best.job.job]:
                found[job] = (f"{reason}, and its held-out objf {scores[job]:.3f} is below "
                              f"{scores[best.job.job]:.3f} of job {best.job.job}")
        return found

    def _parameters_of(self, result: JobResult, round_: Round) -> Vector:
        """All parameters at the end of a job; outside the fragment sent, those of the model."""
        job, sent = result.job, result.sent.read()
        if job.returns == "move":
            return starting_point(job.start, self.layout) + sent
        if job.send == (0, 1):
            return sent
        parameters = round_.model.read().copy()
        for target, source in self.layout.fragment(*job.send):
            parameters[target] = sent[source]
        return parameters

    def _step(self, plan: Plan, num_accepted: int, vectors: Sequence[Vector | Mean],
              weights: Sequence[float]) -> None:
        info = OuterInfo(plan.outer_iter, self.schedule.num_outer_iters, num_accepted, plan.iteration.lr)
        index, count = self._starts.fragment(plan.outer_iter)
        self.optimizer.step(vectors, weights, info, pieces=None if count == 1 else self.layout.fragment(index, count),
                            statistics=self.layout.statistics(), returns=self._starts.returns)
        if count == 1 and self._starts.returns == "parameters":
            if len(vectors) > 1:  # a single one is the mean of several already, or has nothing to be pooled with
                pool_variances(self.optimizer.eval_model(), vectors, weights, self.layout.mean_and_variance())
            for part in self.layout.statistics():  # a moving average of statistics would be of no data
                self.optimizer.final_model()[part] = self.optimizer.eval_model()[part]

    def _restore(self, before: Checkpoint) -> None:
        """Takes an outer step back.

        The arrays of `before` are those that the step has changed, so the checkpoint is read again.
        """
        if before.model_sha256:
            path = self.checkpoints.directory / f"iter-{before.progress.outer_iter:06d}"
            self.optimizer.load_state_dict(self.checkpoints.load(path).outer_state())
        else:
            self.optimizer = self._new_optimizer(before)
        stage, self._stage = self._stage, self.stages.at(before.progress.outer_iter)
        if stage != self._stage:
            self._remake(stage)

    def _new_optimizer(self, start: Checkpoint) -> OuterOptimizer:
        return OuterOptimizer(make_rule(self.outer), start.parameters,
                              ema_decay=self.outer.ema_decay, num_threads=self.num_threads)

    def _progress(self, round_: Round, old: Progress, accepted: list[JobResult]) -> Progress:
        """Where the run stands once this outer iteration is committed."""
        progress = _after(round_.plan, old)
        progress = replace(
            progress, frames_processed=old.frames_processed + sum(r.num_frames for r in accepted),
            elapsed_s=self.clock() - self._began, quarantined=(*old.quarantined, *round_.quarantined),
            pending=(*progress.pending, *round_.deferred))
        if self.objective.equalise_layers:
            progress = replace(progress, layer_rates=equalised(self.layout, round_.model.read(), self.optimizer.eval_model(),
                                                               old.layer_rates, last_layer_factor=self.objective.last_layer_factor))
        return progress

    def _commit(self, round_: Round, before: Checkpoint, progress: Progress, record: OuterIterationRecord) -> Checkpoint:
        # write-ahead: the ledger is on disk before the checkpoint that refers to it
        self.ledger.sync()
        self._num_rollbacks = 0
        state = self.optimizer.state_dict()
        after = self.checkpoints.save(progress, state, {
            "outer_iter": progress.outer_iter, "frames_processed": progress.frames_processed, "parent": before.model_sha256,
            "num_accepted": record.num_accepted, "numbers": {"lr": round_.plan.iteration.lr, **state["numbers"]}},
            fisher=self._starts.fisher, record=record)
        self.ledger.committed(after.commit)
        return after

    def _end(self, round_: Round) -> None:
        """Gives back the vectors that only this outer iteration needed."""
        for result in round_.results.values():
            self._leases.offer(result.sent)
            self._leases.offer(result.own)
        self._leases.drop(round_.model)

    def _rolled_back(self, plan: Plan, before: Checkpoint, error: NgsgdError) -> Checkpoint:
        if self.failure.on_divergence == "stop" or not isinstance(error, DivergenceError):
            raise error
        self._num_rollbacks += 1
        if self._num_rollbacks > self.failure.max_rollbacks:
            raise DivergenceError(f"outer iteration {plan.outer_iter + 1} failed again after {self.failure.max_rollbacks} "
                                  "roll-backs; lower schedule.lr_initial and resume, or start again.") from error
        lr_scale = before.progress.lr_scale / 2
        self.ledger.rolled_back(plan.outer_iter, str(error), lr_scale)
        self._tell("rolled_back", f"outer iteration {plan.outer_iter + 1} runs again from the last model at {lr_scale:g} times the "
                   f"learning rate: {error}", plan.outer_iter, -1, -1)
        return replace(before, progress=replace(before.progress, lr_scale=lr_scale))

    def _forget(self, ahead: Round | None) -> None:
        if ahead:
            self._dispatch.drain(ahead)
            self._end(ahead)
        self._starts.forget()

    def _record(self, round_: Round, progress: Progress, verdicts: Verdicts) -> OuterIterationRecord:
        plan, iteration = round_.plan, round_.plan.iteration
        passes = progress.passes_done
        per_epoch = self.schedule.num_archives * self.schedule.frames_per_eg
        elapsed_s = progress.elapsed_s
        # jobs weigh alike, so what is left goes with the passes, not with the outer iterations
        share = passes / max(self.schedule.num_passes, passes)
        return OuterIterationRecord(
            outer_iter=plan.outer_iter, num_outer_iters=max(self.schedule.num_outer_iters, plan.outer_iter + 1),
            num_jobs=plan.num_jobs, num_accepted=sum(not reason for _, reason in verdicts), epoch=passes / per_epoch,
            num_epochs=self.schedule.num_epochs, frames_processed=progress.frames_processed,
            effective_lr=iteration.effective_lr, lr=iteration.lr, gain=iteration.gain,
            train=_UNKNOWN, valid=_UNKNOWN,
            jobs=tuple(_job_record(result, reason, round_.arrived_s.get(result.job.job, 0.0) - self._began)
                       for result, reason in verdicts),
            relative_change=self.layout.relative_change(round_.model.read(), self.optimizer.eval_model()),
            compute_s=0.0, average_s=0.0, checkpoint_s=0.0, diagnostics_s=0.0, elapsed_s=elapsed_s,
            left_s=elapsed_s * (1.0 - share) / share, patience_s=self._dispatch.patience_s(),
            workers_alive=self.pool.num_workers_alive(),
            num_deaths=self._dispatch.num_deaths, num_discarded=self._dispatch.num_discarded, num_deferred=len(round_.deferred))

    def _tell(self, what: str, message: str, outer_iter: int, job: int, worker: int) -> None:
        self.tracker.incident(Incident(what, message, outer_iter, job, worker, self.clock() - self._began))


class _Gathered(NamedTuple):
    """The end of an outer iteration, before anything is written down."""

    verdicts: Verdicts
    error: NgsgdError | None                 # too little was accepted, and nothing is averaged
    vectors: Sequence[Vector | Mean]         # what the accepted jobs sent, or its mean alone
    weights: Sequence[float]


class _Clock:
    """Seconds between two laps."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last = now()

    def lap(self) -> float:
        last, self._last = self._last, self._now()
        return self._last - last


def _after(plan: Plan, before: Progress) -> Progress:
    """Where a run is once `plan` is done, as far as the plan after it must know."""
    # a plan takes up all that was put off when it was made; what was put off since waits for the plan after it
    return replace(before, outer_iter=plan.outer_iter, passes_done=plan.iteration.passes_done + plan.num_fresh,
                   pending=tuple(piece for piece in before.pending if piece not in plan.taken_up))


def _job_record(result: JobResult, reason: str, ended_s: float) -> JobRecord:
    return JobRecord(result.job.job, result.worker, result.job.attempt, result.num_frames, result.num_minibatches,
                     result.objf, result.accuracy, result.seconds, result.max_change_share,
                     result.max_param_change_share, result.num_skipped, not reason, reason, result.health, ended_s,
                     result.host, result.machine)
