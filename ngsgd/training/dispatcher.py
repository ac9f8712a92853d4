"""From the jobs of an outer iteration to their results: who runs what, what is tried again, and
what is given up.

Nothing here averages.  A job whose worker dies or hangs is tried again, put off or dropped, as
`failure.policy` says; a result that was damaged on its way is asked for again; a piece of data that
kills every worker it meets is quarantined.

A worker hangs when it makes no progress until a deadline, and is then killed.  Two cases look the
same and are none:
    The coordinator was stopped, and its workers with it (a paused machine, a suspended job): that
    time is not counted, and after an absence that is long for the deadline each worker has a full
    one.
    All busy workers, at least two, fall silent at about the same time: something that they share
    stopped them, and they have `_SHARED` deadlines.
A worker that the coordinator killed is no evidence against its data, so that data is never
quarantined for it.  It is tried `failure.max_attempts` times on whatever worker is free; when all
these hang, the shard is dropped from this outer iteration by name, or with
`failure.on_repeated_crash=stop` the run ends.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ngsgd.errors import ClusterError, DamagedArchiveError, NgsgdError, RunInterrupted
from ngsgd.schedules import Shard
from ngsgd.training.awake_clock import AwakeClock
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, VectorRef, WorkItem
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.planning import Plan
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.validation.checksums import is_damaged
from ngsgd.training.worker_pool import WorkerPool

# how often a wish to stop, and who makes no progress, is looked at while jobs run
_POLL_S = 0.2
# a poll that took longer: the coordinator itself was stopped
_ABSENT_S = 1.0
# share of a deadline; after a longer absence the deadlines begin again, a shorter one is only not
# counted
_NOTABLE = 0.25
# deadlines for workers that all fell silent together
_SHARED = 4.0
# medians of a minibatch's time without a minibatch: the worker hangs
_HANG_FACTOR = 5.0
# share of a job that a partial result must have done
_WORTH_KEEPING = 0.5


class StopSignal(Protocol):
    """The user's or the cluster's wish that the run ends."""

    def requested(self) -> bool:
        """Finish the running outer iteration and stop."""

    def expired(self) -> bool:
        """Stop now: the time to finish is over."""


class NeverStop:
    """Nobody wishes it: for runs that are part of something else, which ends them."""

    def requested(self) -> bool:
        return False

    def expired(self) -> bool:
        return False


# what, message, outer iteration, job, worker
EmitIncident = Callable[[str, str, int, int, int], None]


@dataclass
class OuterIterationState:
    """An outer iteration under way."""

    plan: Plan
    # what the jobs start from
    model: VectorRef
    avoided: frozenset[Shard]              # in quarantine
    # jobs end with what they have after so many seconds
    round_s: float
    # seconds on the dispatcher's clock, once the first job runs
    ends_at: float = math.inf
    # the jobs were told to end with what they have
    is_stopped: bool = False
    # jobs that cannot be made yet
    to_come: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    waiting: deque[Job] = field(default_factory=deque)
    results: dict[int, JobResult] = field(default_factory=dict)
    # by job, on the clock
    arrived_s: dict[int, float] = field(default_factory=dict)
    # by job: what is wrong with its result
    rejection_reasons: dict[int, str] = field(default_factory=dict)
    unsettled: set[int] = field(default_factory=set)
    deferred: list[WorkItem] = field(default_factory=list)
    quarantined: list[WorkItem] = field(default_factory=list)

    def in_order(self) -> list[JobResult]:
        """Whoever finished first, sums run over the jobs in order."""
        return [self.results[job] for job in sorted(self.results)]


class Dispatcher:
    """Feeds a pool with jobs and settles what comes back."""

    def __init__(self, pool: WorkerPool, ledger: Ledger, layout: FlatLayout,
                 settings: EngineSettings, stop: StopSignal,
                 emit_incident: EmitIncident, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.ledger = ledger
        self.layout = layout
        self.failure = settings.failure
        self.cluster = settings.cluster
        self.stop = stop
        self.emit_incident = emit_incident
        self.clock = clock
        self.on_corrupt = settings.on_corrupt
        self._damaged: set[int] = set()                   # archives
        self.num_deaths = 0
        # when there last were enough workers
        self._enough_at: float | None = None
        self.num_discarded = 0
        # of work that was put off
        self._failures: dict[WorkItem, int] = {}
        # tries that ended because the coordinator killed the worker
        self._hangs: dict[WorkItem, int] = {}
        # where workers may be silent for less than some polls only, a shorter time is an absence
        self._awake = AwakeClock(clock,
                                 min(_ABSENT_S, max(2 * _POLL_S, self.failure.hang_timeout_s / 2)))
        # by worker: its last progress, and since when
        self._seen: dict[int, tuple[object, float]] = {}
        self._minibatch_s: deque[float] = deque(maxlen=64)

    def open(self, plan: Plan, model: VectorRef, quarantined: tuple[WorkItem, ...],
             round_s: float) -> OuterIterationState:
        """Begins an outer iteration whose jobs are to come."""
        self.ledger.planned(plan)
        shards = frozenset(piece.shard for piece in quarantined)
        jobs = range(plan.num_jobs)
        return OuterIterationState(plan, model, shards, round_s, to_come=set(jobs),
                                   unsettled=set(jobs))

    def enqueue(self, state: OuterIterationState, job: Job) -> None:
        """Takes a job that can run; work on a quarantined shard is given up at once."""
        state.to_come.discard(job.job)
        if any(piece.shard in state.avoided for piece in job.pieces):
            self._give_up(state, job, "quarantined", "its shard is in quarantine")
        elif any(piece.shard.archive in self._damaged for piece in job.pieces):
            self._quarantine_damaged(state, job)
        else:
            state.waiting.append(job)

    def finish(self, state: OuterIterationState, ahead: OuterIterationState | None,
               make_jobs: Callable[[], None]) -> None:
        """Returns when every job of `state` is settled; `make_jobs` adds those of `ahead` that can
        run by now.
        """
        states = [state, ahead] if ahead else [state]
        self._begin_to_watch()
        while state.unsettled:
            make_jobs()
            for one in states:
                self._feed(one)
            self._serve(states)
        make_jobs()
        if ahead:
            self._feed(ahead)

    def take_back(self, state: OuterIterationState, failures: Sequence[JobFailure]) -> None:
        """Undoes results that can no longer be read; `finish` sees to their jobs, as to all that
        failed.
        """
        for failure in failures:
            result = state.results.pop(failure.job.job)
            state.rejection_reasons.pop(failure.job.job, None)
            state.deferred = [piece for piece in state.deferred if piece not in result.remainder]
            state.unsettled.add(failure.job.job)
            self._release(result)
            self._after_failure(state, failure)

    def drain(self, state: OuterIterationState) -> None:
        """Waits for the jobs of an outer iteration that is given up, and throws away what they
        return.
        """
        state.waiting.clear()
        self._begin_to_watch()
        while state.running:
            self._serve([state])
            state.waiting.clear()

    def _serve(self, states: list[OuterIterationState]) -> None:
        """Waits for one thing to happen."""
        if self.stop.expired():
            self.pool.abandon()
            raise RunInterrupted(f"outer iteration {states[0].plan.outer_iter + 1} was given up")
        if self._awake.tick() > self.hang_timeout_s() * _NOTABLE:
            # who was stopped with this process has a full deadline from now on
            self._seen = {}
        self._stop_in_time(states[0])
        self._watch()
        for one in self.pool.retired():
            self.emit_incident(one.what, one.message, states[0].plan.outer_iter, -1, one.worker)
        self._require_workers()
        outcome = self.pool.wait(_POLL_S)
        if outcome is not None:
            self._settle(outcome, states)

    def _begin_to_watch(self) -> None:
        """After other work, which may have taken any time; jobs of the outer iteration ahead run
        meanwhile.
        """
        self._awake.catch_up()
        self._seen = {}

    def _stop_in_time(self, state: OuterIterationState) -> None:
        """Ends the jobs of a round whose time is over, or of a run that shall end and may put work
        off.
        """
        leave_it = self.failure.policy == "defer" and self.stop.requested()
        if not state.is_stopped and (leave_it or self._awake.now >= state.ends_at):
            state.is_stopped = True
            self.pool.stop_jobs()

    def _require_workers(self) -> None:
        """Fewer workers are no reason to stop; too few, for as long as a start may take, are."""
        now, alive = self._awake.now, self.pool.num_workers_alive()
        if alive >= self.cluster.min_workers or self._enough_at is None:
            self._enough_at = now
        elif now - self._enough_at > self.cluster.start_timeout_s:
            raise ClusterError(f"only {alive} of {self.cluster.num_workers} workers are left, and "
                               "no others came within cluster.start_timeout_s = "
                               f"{self.cluster.start_timeout_s:g}; see whether the cluster still "
                               "has their CPUs or GPUs, or lower cluster.min_workers and resume.")

    def hang_timeout_s(self) -> float:
        """Seconds without a minibatch after which a worker hangs: derived from what was measured."""
        typical = statistics.median(self._minibatch_s) if self._minibatch_s else 0.0
        return max(self.failure.hang_timeout_s, _HANG_FACTOR * typical)

    def _feed(self, state: OuterIterationState) -> None:
        if state.is_stopped:
            while state.waiting:
                job = state.waiting.popleft()
                state.deferred += job.pieces
                self._give_up(state, job, "deferred", "the outer iteration was ended")
        while state.waiting and self.pool.num_idle():
            self.ledger.submitted(state.waiting[0])
            state.running.add(state.waiting[0].job)
            state.ends_at = min(state.ends_at, self._awake.now + state.round_s)
            self.pool.submit(state.waiting.popleft())

    def _watch(self) -> None:
        """Ends workers that hang: processes that are there, and make no progress."""
        now, deadline_s = self._awake.now, self.hang_timeout_s()
        seen: dict[int, tuple[object, float]] = {}
        for worker, progress in self.pool.progress().items():
            before, since = self._seen.get(worker, (None, now))
            seen[worker] = (progress, since if progress == before else now)
        # one that hangs leaves the others working: where all are silent, they wait for something
        # that they share
        if len(seen) > 1 and all(now - since > deadline_s / 2 for _, since in seen.values()):
            deadline_s *= _SHARED
        for worker, (last, since) in seen.items():
            if now - since > deadline_s:
                self.pool.kill(worker, f"made no progress for {deadline_s:.3g} s and was killed")
                seen[worker] = (last, now)
        self._seen = seen

    def _settle(self, outcome: Outcome, states: list[OuterIterationState]) -> None:
        state = next((r for r in states if r.plan.outer_iter == outcome.job.outer_iter), None)
        if state is None or outcome.job.job not in state.unsettled:
            if isinstance(outcome, JobResult):  # the same twice
                self.num_discarded += 1
                self.ledger.discarded(outcome, "nobody waits for it")
            return
        state.running.discard(outcome.job.job)
        if isinstance(outcome, JobFailure):
            self._after_failure(state, outcome)
        else:
            self._take(state, outcome)

    def _take(self, state: OuterIterationState, result: JobResult) -> None:
        job = result.job
        size = sum(source.stop - source.start for _, source in self.layout.fragment(*job.send))
        damage = is_damaged(result, size)
        if damage:
            self.ledger.discarded(result, damage)
            self._release(result)
            self._after_failure(state, JobFailure(job, result.worker,
                                                  f"its result arrived damaged: {damage}", False))
            return
        left = sum((piece.stop or 0) - piece.first for piece in result.remainder)
        is_worth_keeping = (self.failure.policy != "retry"
                            and result.num_minibatches >= _WORTH_KEEPING
                            * (result.num_minibatches + left))
        if result.remainder and not state.is_stopped and not is_worth_keeping:
            self._release(result)
            self._after_failure(state,
                                JobFailure(job, result.worker,
                                           "was asked to end before its job was done", False))
            return
        if state.is_stopped or self.failure.policy == "defer":
            state.deferred += result.remainder
        self._minibatch_s.append(result.seconds / max(result.num_minibatches, 1))
        if result.rejection_reason:
            state.rejection_reasons[job.job] = result.rejection_reason
        state.results[job.job], state.arrived_s[job.job] = result, self.clock()
        state.unsettled.discard(job.job)

    def _after_failure(self, state: OuterIterationState, failure: JobFailure) -> None:
        job = failure.job
        self.ledger.failed(failure)
        if isinstance(failure.error, DamagedArchiveError) and self.on_corrupt == "quarantine":
            self._after_damage(state, failure, failure.error)
            return
        # wrong data stay wrong however often they are read
        if isinstance(failure.error, NgsgdError):
            raise failure.error
        self.num_deaths += failure.worker_died
        what = f"worker {failure.worker} {'died' if failure.worker_died else 'failed'} ({failure.reason})"
        who = f"{what} during job {job.job} of outer iteration {job.outer_iter + 1}, attempt {job.attempt}"
        tries = job.attempt + self._failures.get(job.pieces[0], 0)
        hangs = self._hangs.get(job.pieces[0], 0) + failure.from_outside
        self._hangs[job.pieces[0]] = hangs
        if hangs >= self.failure.max_attempts:
            self._give_up_after_hangs(state, failure, who, hangs)
        elif tries - hangs >= self.failure.max_attempts:
            self._give_up_after(state, failure, who, tries - hangs)
        elif self.failure.policy == "retry":
            state.waiting.appendleft(replace(job, attempt=job.attempt + 1))
            self._emit_failure(failure, f"{who}; its shard runs again{failure.last_words}.")
        elif self.failure.policy == "defer":
            self._failures[job.pieces[0]] = tries
            state.deferred += job.pieces
            self._give_up(state, job, "deferred", failure.reason)
            self._emit_failure(failure, f"{who}; its shard is put off to the next outer "
                                        f"iteration{failure.last_words}.")
        else:
            self._give_up(state, job, "dropped", failure.reason)
            self._emit_failure(failure, f"{who}; its shard is left out, since failure.policy is "
                                        f"drop{failure.last_words}.")

    def _after_damage(self, state: OuterIterationState, failure: JobFailure,
                      error: DamagedArchiveError) -> None:
        if error.archive not in self._damaged:
            self._damaged.add(error.archive)
            self.emit_incident("archive_quarantined",
                               f"archive {error.archive} is damaged and is not read again in this "
                               f"run, since egs.on_corrupt is quarantine: {error}",
                               failure.job.outer_iter, failure.job.job, failure.worker)
        self._quarantine_damaged(state, failure.job)

    def _quarantine_damaged(self, state: OuterIterationState, job: Job) -> None:
        # what else the job would have read is left out this once, and is sound
        state.quarantined += [piece for piece in job.pieces if piece.shard.archive in self._damaged]
        self._give_up(state, job, "quarantined", "its archive is damaged")

    def _give_up_after(self, state: OuterIterationState, failure: JobFailure, who: str,
                       tries: int) -> None:
        """All attempts failed: poison if workers died of it, bad luck otherwise."""
        job = failure.job
        where = f"archive {job.shard.archive}, frame {job.shard.frame}"
        if not failure.worker_died:
            self._give_up(state, job, "dropped", failure.reason)
            self.emit_incident("job_dropped", f"{who}; {where} is left out of this outer iteration "
                                              f"after {tries} attempts"
                               f"{failure.last_words}.", job.outer_iter, job.job, failure.worker)
        elif self.failure.on_repeated_crash == "stop":
            raise ClusterError(f"{who}; {where} has ended {tries} workers, and "
                               "failure.on_repeated_crash is stop: look at that archive, then "
                               f"resume{failure.last_words}.")
        else:
            state.quarantined += job.pieces
            self._give_up(state, job, "quarantined", failure.reason)
            self.emit_incident("shard_quarantined",
                               f"{who}; {where} has ended {tries} workers and is not tried again "
                               "in this run"
                               f"{failure.last_words}.", job.outer_iter, job.job, failure.worker)

    def _give_up_after_hangs(self, state: OuterIterationState, failure: JobFailure, who: str,
                             hangs: int) -> None:
        """Every worker hung: a deadlock that comes with the data, or a machine that does not work;
        not poison in any case.
        """
        job = failure.job
        where = f"archive {job.shard.archive}, frame {job.shard.frame}"
        if self.failure.on_repeated_crash == "stop":
            raise ClusterError(f"{who}; {where} was lost with {hangs} workers that had to be "
                               "killed, and failure.on_repeated_crash is stop: see why they hang, "
                               f"then resume{failure.last_words}.")
        self._give_up(state, job, "dropped", failure.reason)
        self.emit_incident("job_dropped", f"{who}; {where} is left out of this outer iteration "
                                          f"after {hangs} workers that had "
                           f"to be killed{failure.last_words}.", job.outer_iter, job.job,
                           failure.worker)

    def _give_up(self, state: OuterIterationState, job: Job, event: str, reason: str) -> None:
        self.ledger.settled_without(event, job, reason)
        state.unsettled.discard(job.job)

    def _emit_failure(self, failure: JobFailure, message: str) -> None:
        what = "worker_died" if failure.worker_died else "job_failed"
        self.emit_incident(what, message, failure.job.outer_iter, failure.job.job, failure.worker)

    def _release(self, result: JobResult) -> None:
        self.pool.release(result.sent)
        if result.own is not None and result.own is not result.sent:
            self.pool.release(result.own)
