"""Dispatch of the jobs of an outer iteration: assignment to workers, retries and rejection.

A job whose worker dies or hangs is retried, deferred or dropped, according to `failure.policy`. A
result that was damaged in transfer is requested again.

A worker that makes no progress until its deadline counts as hung and is killed. The time in which
the coordinator was stopped together with its workers is not counted; after a long absence, every
worker gets a full deadline. If all busy workers, at least two, become silent at about the same
time, the cause is shared, and their deadline is multiplied by `_SHARED`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from ngsgd.config import FailureConfig
from ngsgd.counting import counted
from ngsgd.errors import ClusterError, CrashingShardError, DamagedArchiveError, FailureKind, NgsgdError, RunInterrupted
from ngsgd.schedules import Shard
from ngsgd.training.auditing.audits import Audits
from ngsgd.training.auditing.pool import QUARANTINED
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, VectorRef, WorkItem
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.planning import Plan
from ngsgd.training.records import Incident
from ngsgd.training.settings import EngineSettings
from ngsgd.training.snapshots.book import continued
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.validation.acceptance import fewest_results
from ngsgd.training.validation.checksums import is_damaged
from ngsgd.training.worker_pool import VectorRefcount, WorkerPool
from ngsgd.training.worker_wait import AwakeClock, WorkerWait

# interval at which stop requests and hung workers are checked while jobs run
_POLL_S = 0.2
# a longer poll means that the coordinator itself was stopped
_ABSENT_S = 1.0
# fraction of a deadline; a longer absence restarts the deadlines, a shorter one is only not counted
_NOTABLE = 0.25
# factor of the deadline when all workers become silent together
_SHARED = 4.0
# a worker hangs after this many median minibatch times without a minibatch
_HANG_FACTOR = 5.0
# minimum completed fraction of a job for its partial result to be kept
_WORTH_KEEPING = 0.5


class StopSignal(Protocol):
    """Requests of the user or the cluster to end the run."""

    def requested(self) -> bool:
        """Return True to finish the running outer iteration and stop."""
        return False

    def expired(self) -> bool:
        """Return True to stop now: the time to finish is over."""
        return False


class NeverStop(StopSignal):
    """A signal that never stops, for runs that are part of a larger program."""


@dataclass
class OuterIterationState:
    """State of an outer iteration in progress."""

    plan: Plan
    # vector that the jobs start from
    model: VectorRef
    avoided: frozenset[Shard]              # shards in quarantine
    # duration after which jobs end with partial results
    round_s: float
    # number of the plan
    number: int
    # jobs whose inputs are not available yet
    to_come: set[int] = field(default_factory=set)
    unsettled: set[int] = field(default_factory=set)
    # archives that were found damaged so far
    damaged: set[int] = field(default_factory=set)
    # seconds on the dispatcher's clock; set when the first job runs
    ends_at: float = math.inf
    # jobs were asked to end with partial results
    is_stopped: bool = False
    running: set[int] = field(default_factory=set)
    waiting: deque[Job] = field(default_factory=deque)
    results: dict[int, JobResult] = field(default_factory=dict)
    # job -> arrival time on the dispatcher's clock
    arrived_s: dict[int, float] = field(default_factory=dict)
    # job -> reason why its result is rejected
    rejection_reasons: dict[int, str] = field(default_factory=dict)
    # first shards of the jobs that ran and have no result
    given_up: set[Shard] = field(default_factory=set)
    # jobs that do not count: their data were in quarantine before they could run, or another job on
    # the same shard was given up
    skipped: set[int] = field(default_factory=set)
    deferred: list[WorkItem] = field(default_factory=list)
    quarantined: list[WorkItem] = field(default_factory=list)


class Dispatcher:
    """Submits jobs to a pool and processes their outcomes."""

    def __init__(self, pool: WorkerPool, ledger: Ledger, layout: FlatLayout,
                 settings: EngineSettings, stop: StopSignal,
                 emit_incident: Callable[[Incident], None], clock: Callable[[], float],
                 report: Callable[[str], object] = lambda _line: None) -> None:
        self.pool, self.ledger, self.layout = pool, ledger, layout
        self.failure, self.cluster = settings.failure, settings.cluster
        self.stop, self.clock, self.emit_incident = stop, clock, emit_incident
        self.on_corrupt = settings.on_corrupt
        self._damaged: set[int] = set()                   # archives
        self.num_deaths = self.num_discarded = self._num_plans = 0
        self._wait = WorkerWait(self.cluster.wait_for_workers_s, report)
        # work items that were deferred -> failed attempts
        self._failures: dict[WorkItem, int] = {}
        # attempts that ended because the coordinator killed the worker
        self._hangs: dict[WorkItem, int] = {}
        # if hang_timeout_s is only a few polls, a shorter gap counts as an absence
        self._awake = AwakeClock(clock, min(_ABSENT_S, max(2 * _POLL_S, self.failure.hang_timeout_s / 2)))
        # worker -> (last progress, time since which it is unchanged)
        self._seen: dict[int, tuple[object, float]] = {}
        self._minibatch_s: deque[float] = deque(maxlen=64)
        self.refcount = VectorRefcount(pool)
        self.audits = Audits(pool, ledger, layout, self.failure.audit_every, emit_incident, self.refcount, self._release, clock)

    def open(self, plan: Plan, model: VectorRef, quarantined: tuple[WorkItem, ...], round_s: float) -> OuterIterationState:
        """Start an outer iteration; its jobs are added later."""
        self.ledger.planned(plan)
        self._num_plans += 1
        return OuterIterationState(plan, model, frozenset(piece.shard for piece in quarantined), round_s, self._num_plans,
                                   set(range(plan.num_jobs)), set(range(plan.num_jobs)), self._damaged)

    def enqueue(self, state: OuterIterationState, job: Job) -> None:
        """Accept a job that can run; jobs on a quarantined shard are rejected immediately."""
        state.to_come.discard(job.job)
        job = replace(job, plan=state.number)
        if any(piece.shard in state.avoided for piece in job.pieces):
            state.skipped.add(job.job)
            self._give_up(state, job, "quarantined", "its shard is in quarantine")
        elif any(piece.shard.archive in self._damaged for piece in job.pieces):
            state.skipped.add(job.job)
            self._quarantine_damaged(state, job)
        else:
            state.waiting.append(job)

    def finish(self, state: OuterIterationState, ahead: OuterIterationState | None, make_jobs: Callable[[], None]) -> None:
        """Process outcomes until `state` is settled; `make_jobs` adds the jobs of `ahead`."""
        states = [state, ahead] if ahead else [state]
        self._begin_to_watch()
        while state.unsettled or self.audits.are_running(state.plan.outer_iter):
            make_jobs()
            for one in states:
                self._feed(one)
            self._serve(states)
            self._take_audited(states)
        make_jobs()
        if ahead:
            self._feed(ahead)

    def take_back(self, state: OuterIterationState, failures: Sequence[JobFailure]) -> None:
        """Undo results that can no longer be read; `finish` handles their jobs as failed."""
        for failure in failures:
            result = state.results.pop(failure.job.job)
            state.rejection_reasons.pop(failure.job.job, None)
            state.deferred = [piece for piece in state.deferred if piece not in result.remainder]
            state.unsettled.add(failure.job.job)
            self._release(result)
            self._after_failure(state, failure)

    def drain(self, state: OuterIterationState) -> None:
        """Wait for the jobs of an abandoned outer iteration and discard their results."""
        state.waiting.clear()
        for result in self.audits.forget(state.plan.outer_iter):
            self._keep(state, result)
        self._begin_to_watch()
        while state.running or self.audits.are_running(state.plan.outer_iter):
            self._serve([state])
            state.waiting.clear()

    def _serve(self, states: list[OuterIterationState]) -> None:
        if self.stop.expired():
            self.pool.abandon()
            raise RunInterrupted(f"outer iteration {states[0].plan.outer_iter + 1} was abandoned")
        if self._awake.tick() > self.hang_timeout_s() * _NOTABLE:
            # workers that were stopped with this process get a full deadline from now on
            self._seen = {}
        # the time of the round is over, or a stopping run may defer work
        leave_it = self.failure.policy == "defer" and self.stop.requested()
        if not states[0].is_stopped and (leave_it or self._awake.now >= states[0].ends_at):
            states[0].is_stopped = True
            # not those that run ahead, whose time has hardly begun
            self.pool.stop_jobs(states[0].plan.outer_iter)
        self._watch()
        for one in self.pool.retired():
            self.emit_incident(Incident(one.what, one.message, states[0].plan.outer_iter, worker=one.worker, kind=one.kind))
        alive, cluster = self.pool.num_workers_alive(), self.cluster
        if self._wait.is_over(self._awake.now, alive, 1, cluster.num_workers, self.pool.has_busy_start):
            raise ClusterError(f"only {alive} of {cluster.num_workers} workers are alive, and no others joined within "
                               f"cluster.wait_for_workers_s = {cluster.wait_for_workers_s:g}; check that the cluster still "
                               "has their CPUs or GPUs, then resume.")
        outcome = self.pool.wait(_POLL_S)
        if outcome is not None:
            self._settle(outcome, states)

    def _begin_to_watch(self) -> None:
        """Reset the deadlines after other work of any duration, during which jobs may have run."""
        self._awake.catch_up()
        self._seen = {}

    def hang_timeout_s(self) -> float:
        """Seconds without a minibatch after which a worker hangs, from measured step times."""
        typical = statistics.median(self._minibatch_s) if self._minibatch_s else 0.0
        return max(self.failure.hang_timeout_s, _HANG_FACTOR * typical)

    def _feed(self, state: OuterIterationState) -> None:
        if state.is_stopped:
            while state.waiting:
                job = state.waiting.popleft()
                state.deferred += job.pieces
                self._give_up(state, job, "deferred", "the outer iteration was ended")
        # not counted for each job: there may be a thousand of both
        for _ in range(min(len(state.waiting), self.pool.num_idle()) if state.waiting else 0):
            self.ledger.submitted(state.waiting[0])
            state.running.add(state.waiting[0].job)
            state.ends_at = min(state.ends_at, self._awake.now + state.round_s)
            job = state.waiting.popleft()
            self.pool.submit(job)
            self.audits.submitted(state.plan, job)
        if not state.waiting:
            self.audits.feed(state.plan.outer_iter, self.hang_timeout_s(), is_stopping=self.stop.requested())

    def _watch(self) -> None:
        """Kill hung workers: processes that are alive and make no progress."""
        now, deadline_s = self._awake.now, self.hang_timeout_s()
        seen: dict[int, tuple[object, float]] = {}
        for worker, progress in self.pool.progress().items():
            before, since = self._seen.get(worker, (None, now))
            seen[worker] = (progress, since if progress == before else now)
        # the others work while a single worker hangs; if all are silent, they wait for a resource
        if len(seen) > 1 and all(now - since > deadline_s / 2 for _, since in seen.values()):
            deadline_s *= _SHARED
        for worker, (last, since) in seen.items():
            if now - since > deadline_s:
                self.pool.kill(worker, f"made no progress for {deadline_s:.3g} s and was killed")
                seen[worker] = (last, now)
        self._seen = seen

    def _settle(self, outcome: Outcome, states: list[OuterIterationState]) -> None:
        if outcome.job.repeat:
            self.num_deaths += isinstance(outcome, JobFailure) and outcome.worker_died
            self.audits.settle(outcome)
            return
        # a result of a plan before a roll-back may arrive again
        state = next((r for r in states if r.number == outcome.job.plan), None)
        if state is None or self.audits.holds(outcome.job) or outcome.job.job not in state.unsettled:
            if isinstance(outcome, JobResult):  # duplicate result
                self.num_discarded += 1
                self.ledger.discarded(outcome, "duplicate or late result")
            return
        state.running.discard(outcome.job.job)
        if isinstance(outcome, JobFailure):
            self._after_failure(state, outcome)
        else:
            self._take(state, outcome)

    def _take(self, state: OuterIterationState, result: JobResult) -> None:
        if damage := is_damaged(result, self.layout):
            self.ledger.discarded(result, damage)
            self._fail(state, result, f"its result arrived damaged: {damage}", FailureKind.DAMAGED_RESULT)
            return
        left = sum((piece.stop or 0) - piece.first for piece in result.remainder)
        is_worth_keeping = (self.failure.policy != "retry" and result.num_minibatches >= _WORTH_KEEPING
                            * (result.num_minibatches + left))
        if result.remainder and not state.is_stopped and not is_worth_keeping:
            self._fail(state, result, "was asked to end before its job was done", FailureKind.ASKED_TO_END)
            return
        if state.is_stopped or self.failure.policy == "defer":
            state.deferred += result.remainder
        self._minibatch_s.append(result.seconds / max(result.num_minibatches, 1))
        if not self.audits.hold(result):
            self._keep(state, result)

    def _fail(self, state: OuterIterationState, result: JobResult, reason: str, kind: FailureKind) -> None:
        """Treat the job of a result that is not kept as failed."""
        self._release(result)
        self._after_failure(state, JobFailure(result.job, result.worker, reason, False, kind=kind))

    def _keep(self, state: OuterIterationState, result: JobResult) -> None:
        job = result.job.job
        if result.rejection_reason:
            state.rejection_reasons[job] = result.rejection_reason
        if result.continued_at:
            self.emit_incident(continued(result))
        state.results[job], state.arrived_s[job] = result, self.clock()
        state.unsettled.discard(job)

    def _take_audited(self, states: list[OuterIterationState]) -> None:
        """Keep the results whose audit has ended; run jobs of workers at fault again."""
        for one in self.audits.concluded():
            state = next(r for r in states if r.plan.outer_iter == one.result.job.outer_iter)
            if one.is_right:
                self._keep(state, one.result)
            else:
                self._run_again(state, one.result)
            # successors of these jobs may run already, except those of the last outer iteration
            last = states[-1]
            for result in [result for result in last.results.values() if result.worker in one.faulty]:
                del last.results[result.job.job]
                last.rejection_reasons.pop(result.job.job, None)
                last.unsettled.add(result.job.job)
                self._run_again(last, result)

    def _run_again(self, state: OuterIterationState, result: JobResult) -> None:
        self.ledger.failed(JobFailure(result.job, result.worker, f"its worker {QUARANTINED}", False, kind=FailureKind.QUARANTINED))
        self._release(result)
        state.deferred = [piece for piece in state.deferred if piece not in result.remainder]
        self._retry_elsewhere(state, result.job)

    def _retry_elsewhere(self, state: OuterIterationState, job: Job) -> None:
        """Run a job of a worker at fault again under any policy, since no data is at fault."""
        self.audits.redone[job.pieces[0]] += 1
        state.waiting.append(replace(job, attempt=job.attempt + 1))

    def _after_failure(self, state: OuterIterationState, failure: JobFailure) -> None:
        job = failure.job
        self.ledger.failed(failure)
        error = failure.error
        if isinstance(error, DamagedArchiveError) and self.on_corrupt == "quarantine":
            if error.archive not in self._damaged:
                self._damaged.add(error.archive)
                self.emit_incident(Incident("archive_quarantined", f"archive {error.archive} is damaged and is skipped for "
                                            f"the rest of this run, because egs.on_corrupt is quarantine: {error}",
                                            job.outer_iter, job.job, failure.worker))
            self._quarantine_damaged(state, job)
            return
        # invalid data stay invalid however often they are read
        if isinstance(error, NgsgdError):
            raise error
        self.num_deaths += failure.worker_died
        if failure.kind is FailureKind.QUARANTINED:
            self._retry_elsewhere(state, job)
            return
        piece = job.pieces[0]
        # a machine that was needed elsewhere, however often, is no evidence against the data
        self.audits.redone[piece] += failure.kind is FailureKind.ASKED_TO_END
        num_failed = job.attempt + self._failures.get(piece, 0) - self.audits.redone[piece]
        hangs = self._hangs[piece] = self._hangs.get(piece, 0) + failure.from_outside
        num_left = len(state.results) + len(state.unsettled) - 1
        is_needed = num_left < fewest_results(state.plan.num_jobs, len(state.skipped))
        decision = decide(failure, num_failed - hangs, hangs, self.failure, is_needed=is_needed)
        message = (f"worker {failure.worker} {'died' if failure.worker_died else 'failed'} ({failure.reason}) during job "
                   f"{job.job} of outer iteration {job.outer_iter + 1}, attempt {job.attempt}; "
                   f"{decision.consequence}{failure.last_words}.")
        if decision.what == "stop":
            raise CrashingShardError(message, failure=failure.kind)
        if decision.what == "retried":
            state.waiting.appendleft(replace(job, attempt=job.attempt + 1))
        else:
            if decision.what == "deferred":
                self._failures[piece] = num_failed
                state.deferred += job.pieces
            elif decision.what == "quarantined":
                state.quarantined += job.pieces
            # deferred passes over one shard are one cause
            if job.shard in state.given_up:
                state.skipped.add(job.job)
            state.given_up.add(job.shard)
            self._give_up(state, job, decision.what, failure.reason)
        self.emit_incident(Incident(decision.incident, message, job.outer_iter, job.job, failure.worker, kind=failure.kind))

    def _quarantine_damaged(self, state: OuterIterationState, job: Job) -> None:
        # the other work items of the job are sound; they are skipped this once
        state.quarantined += [piece for piece in job.pieces if piece.shard.archive in self._damaged]
        self._give_up(state, job, "quarantined", "its archive is damaged", FailureKind.DAMAGED_ARCHIVE)

    def _give_up(self, state: OuterIterationState, job: Job, event: str, reason: str,
                 kind: FailureKind = FailureKind.UNKNOWN) -> None:
        self.ledger.settled_without(event, job, reason, kind)
        self.audits.give_up(job)
        state.unsettled.discard(job.job)

    def _release(self, result: JobResult) -> None:
        self.pool.release(result.sent)
        if result.own is not None and result.own is not result.sent:
            self.pool.release(result.own)


@dataclass(frozen=True)
class Decision:
    """The next step for the data of a job, and the incident that reports it."""

    what: Literal["retried", "deferred", "dropped", "quarantined", "stop"]
    incident: str
    # end of the message
    consequence: str


def decide(failure: JobFailure, tries: int, hangs: int, policy: FailureConfig, *, is_needed: bool = False) -> Decision:
    """Decide about the data of a failed attempt.

    Args:
        failure: the attempt.
        tries: failed attempts at these data, except `hangs`.
        hangs: attempts that ended because the coordinator killed the worker. They are no evidence
            against the data, and never quarantine them.
        policy: settings.
        is_needed: without it too few results would be left, and the run would end.
    """
    shard, stops = failure.job.shard, policy.on_repeated_crash == "stop"
    where = f"archive {shard.archive}, frame {shard.frame}"
    if hangs >= policy.max_attempts:
        # a deadlock in the data, or a broken machine
        if stops:
            return Decision("stop", "", f"{hangs} workers hung on {where} and were killed, and failure.on_repeated_crash is stop: "
                                        "find out why they hang, then resume")
        return Decision("dropped", "job_dropped", f"{where} is skipped in this outer iteration after "
                                                  f"{counted(hangs, 'worker')} hung and were killed")
    if tries >= policy.max_attempts:
        if not failure.worker_died:
            return Decision("dropped", "job_dropped", f"{where} is skipped in this outer iteration after "
                                                      f"{counted(tries, 'attempt')}")
        if stops:
            return Decision("stop", "", f"{where} crashed {tries} workers, and failure.on_repeated_crash is stop: inspect that "
                                        "archive, then resume")
        return Decision("quarantined", "shard_quarantined", f"{where} crashed {counted(tries, 'worker')} and is quarantined for "
                                                            "the rest of this run")
    incident = "worker_died" if failure.worker_died else "job_failed"
    if policy.policy == "retry" or is_needed:
        return Decision("retried", incident, "its shard is retried")
    if policy.policy == "defer":
        return Decision("deferred", incident, "its shard is deferred to the next outer iteration")
    return Decision("dropped", incident, "its shard is skipped, because failure.policy is drop")
