"""Averaging of an outer iteration: which results are accepted, and whether their average is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ngsgd.errors import DivergenceError, NgsgdError, QuarantineError
from ngsgd.schedules import Schedule, Shard
from ngsgd.training.averaging.averaged_model import AveragedModel
from ngsgd.training.dispatcher import Dispatcher, OuterIterationState
from ngsgd.training.job import JobResult, ResultsLost
from ngsgd.training.job_init import JobInitializer
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.planning import Progress
from ngsgd.training.storage.checkpoint import Checkpoint
from ngsgd.training.task import Task
from ngsgd.training.validation.acceptance import HeldOutCheck, Verdicts, judge, max_objf_gap, too_few
from ngsgd.training.validation.checksums import is_finite
from ngsgd.training.validation.plausibility import disagrees


class Averager:
    """Validates results, averages them, and validates the average."""

    def __init__(self, task: Task, model: nn.Module, averaged: AveragedModel, dispatcher: Dispatcher,
                 job_init: JobInitializer) -> None:
        self.task, self.averaged, self.layout = task, averaged, averaged.layout
        self.dispatcher, self.job_init = dispatcher, job_init
        gap = max_objf_gap(task, averaged.settings.failure.max_objf_gap, averaged.settings.seed)
        self.held_out = HeldOutCheck(task, model, self.layout, gap)

    def average(self, state: OuterIterationState, before: Checkpoint) -> tuple[Verdicts, NgsgdError | None]:
        """Average the accepted results; if an error is returned, the model stays `before`.

        It also stays if the data of all jobs are in quarantine.

        The new model is scored on held-out data before it is committed. If it is worse than the
        previous model, each result is scored alone. The outer step is then undone and repeated
        without the bad results.
        """
        if has_no_data(state, before.progress):
            return [], None
        self.held_out.begin(self.averaged.parameters(), self.task.growth.stage(state.plan.outer_iter))
        while True:
            try:
                verdicts, bad, error = self._step(state, before)
            except ResultsLost as lost:
                # nothing of this outer iteration has been counted yet
                self.averaged.restore(before)
                self.dispatcher.take_back(state, lost.failures)
                self.dispatcher.finish(state, None, lambda: None)
                continue
            if not bad and not error:
                return verdicts, None
            self.averaged.restore(before)
            if not bad:
                return verdicts, error
            state.rejection_reasons |= bad

    def take(self, parameters: Vector, origin: str) -> None:
        """Take a model averaged elsewhere as the last one; DivergenceError if it is much worse."""
        objf = self.held_out.score(parameters) if is_finite(parameters) else -math.inf
        if failure := self.held_out.failure(objf):
            raise DivergenceError(f"{origin} is not committed: {failure}; lower schedule.lr_initial at all sites, and start them "
                                  "again.")
        self.held_out.commit(objf)

    def _step(self, state: OuterIterationState, before: Checkpoint) -> tuple[Verdicts, Mapping[int, str], NgsgdError | None]:
        """Step with the accepted results, and score the new model.

        Returns (verdicts, reasons to reject results by job, why the model is not committed).
        """
        # in the order of the jobs, so that sums do not depend on arrival order
        results = [state.results[job] for job in sorted(state.results)]
        verdicts, is_contested = judge(results, state.rejection_reasons, self.held_out.tolerance, self.task.chance_objf,
                                       self.layout)
        accepted = [result for result, reason in verdicts if not reason]
        if error := too_few(accepted, verdicts, state.plan, len(state.skipped)):
            return verdicts, {}, error
        if is_contested and (bad := self._bad_results(state, before, accepted)):
            return verdicts, bad, None
        self.averaged.step(state.plan, self.job_init, accepted, [result.num_frames for result in accepted], self.dispatcher.pool)
        return verdicts, *self._check_average(state, before, accepted)

    def _check_average(self, state: OuterIterationState, before: Checkpoint, accepted: Sequence[JobResult]
                       ) -> tuple[Mapping[int, str], DivergenceError | None]:
        """Score the new model; return reasons to reject results, or why it is not committed."""
        model, number = self.averaged.parameters(), state.plan.outer_iter + 1
        is_sound = is_finite(model)
        objf = self.held_out.score(model) if is_sound else -math.inf
        is_expensive = not all(result.sent.is_here for result in accepted)
        if self.held_out.is_suspect(objf, is_expensive=is_expensive) and (bad := self._bad_results(state, before, accepted)):
            return bad, None
        if not is_sound:
            return {}, DivergenceError(f"the model of outer iteration {number} is not finite, although the models of its jobs "
                                       f"are: outer.kind={self.averaged.settings.outer.kind} diverged; lower its gain and resume.")
        if failure := self.held_out.failure(objf):
            return {}, DivergenceError(f"the average of outer iteration {number} is not committed: {failure}, and no single "
                                       "result explains it; lower schedule.lr_initial and resume, or restart.")
        self.held_out.commit(objf)
        return {}, None

    def _bad_results(self, state: OuterIterationState, before: Checkpoint, accepted: Sequence[JobResult]) -> dict[int, str]:
        """Score each result alone on held-out data and return reasons to reject, by job."""
        # the own start of a job may be freed, because its successor runs ahead
        model = self.averaged.read_again(before).broadcast() if self.job_init.returns == "move" else state.model.read()
        scores = {result.job.job: self.held_out.score(self._parameters_of(result, model)) for result in accepted}
        best = max(accepted, key=lambda result: scores[result.job.job])
        found = self.held_out.judge(scores)
        for result in accepted:
            job, reason = result.job.job, disagrees(result, best, self.layout)
            if reason and scores[job] < scores[best.job.job]:
                found[job] = (f"{reason}, and its held-out objf {scores[job]:.3f} is below "
                              f"{scores[best.job.job]:.3f} of job {best.job.job}")
        return found

    def _parameters_of(self, result: JobResult, model: Vector) -> Vector:
        """Return the model with this result alone: outside the fragment sent, that of `model`."""
        job, sent = result.job, result.sent.read()
        if job.returns == "move":
            return model + sent
        if job.send == (0, 1):
            return sent
        parameters = model.copy()
        for target, source in self.layout.fragment(*job.send):
            parameters[target] = sent[source]
        return parameters


# A job whose data were in quarantine before it could run is skipped. It is no evidence about the
# workers or the model, so it does not count among the jobs of which half must be accepted. An outer
# iteration without data is committed with an unchanged model, because a repetition would have no
# data either. If no other data are left, the run ends. If several shards are put in quarantine
# at once and no other result is there, a shared cause is more likely, such as a lost mount. Nothing
# is committed then, so that the data are tried again once the cause is removed.

# shards that a message names
_MAX_NAMED = 16


def has_no_data(state: OuterIterationState, before: Progress) -> bool:
    """Whether all data are in quarantine, at most one shard of them since this outer iteration."""
    gone = state.avoided | {piece.shard for piece in state.quarantined}
    if state.results or not all(any(piece.shard in gone for piece in pieces) for pieces in state.plan.work):
        return False
    tried = {pieces[0].shard for job, pieces in enumerate(state.plan.work) if job not in state.skipped}
    return not tried or (len(tried) == 1 and before.frames_processed > 0)


def message_without_data(state: OuterIterationState, schedule: Schedule) -> str:
    """Describe an outer iteration without data; QuarantineError if no data are left."""
    data = {Shard(archive, frame) for archive in range(schedule.num_archives) for frame in range(schedule.frames_per_eg)}
    in_quarantine = (state.avoided | {piece.shard for piece in state.quarantined}
                     | {shard for shard in data if shard.archive in state.damaged})
    if data <= in_quarantine:
        raise QuarantineError(
            f"all {len(data)} shards of the data are in quarantine ({_names(data)}), and no data are left to train on; "
            "ngsgd why names the faults that led to it. Restore damaged archives and resume, or start a new run.")
    planned = {piece.shard for pieces in state.plan.work for piece in pieces}
    return (f"the data of outer iteration {state.plan.outer_iter + 1} are in quarantine "
            f"({_names(planned & in_quarantine)}): it has no results, and the model is unchanged.")


def _names(shards: Iterable[Shard]) -> str:
    ordered = sorted(shards, key=lambda shard: (shard.archive, shard.frame))
    named = [f"archive {shard.archive}, frame {shard.frame}" for shard in ordered[:_MAX_NAMED]]
    more = len(ordered) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])
