"""Simulated workers and network of a trial: a WorkerPool whose jobs, workers and messages fail."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ngsgd.cluster.exchange.collective import FetchRequest, RemoteResultRef, StepRequest
from ngsgd.cluster.exchange.collective_client import Ending, Exchange, remote
from ngsgd.cluster.restarts import Restarts, distrusted
from ngsgd.errors import ClusterError, DamagedArchiveError
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.pipeline.services import PoolRequest
from ngsgd.training.auditing.pool import QUARANTINED, WorkerIdentity
from ngsgd.training.job import BadBatch, Job, JobFailure, JobResult, Outcome, ResultsLost, VectorRef, WorkItem
from ngsgd.training.parameter_deltas import compress
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.snapshots.book import SnapshotBook, takes_snapshots
from ngsgd.training.validation.bad_batches import INPUT
from ngsgd.training.validation.checksums import digest, not_finite
from ngsgd.training.worker_pool import Retired
from tests.simulation.exchange import Owner, steps
from tests.simulation.production import ProductionWorker, SimulatedMemories, SimulatedMemory
from tests.simulation.scenario import Scenario
from tests.simulation.task import EXAMPLES, SimulatedTask, objective, train_job, work_size
from tests.simulation.world import MAX_WAITS, Fault, Killed, NoProgressError, World

_LATENCY_S = 0.01
# a worker is replaced after so long
_REPLACE_S = 0.1
# added to all parameters of a result that diverges
_DIVERGED = 4.0


class SimulatedRef:
    """A vector of the pool; freed memory holds NaN, as if it was used for something else."""

    is_here = True

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        # vectors that had been allocated by its release
        self.released_at: int | None = None

    def read(self) -> Vector:
        return self.vector


@dataclass
class _Running:
    """A job on a worker."""

    job: Job
    began: float
    minibatch_s: float
    num_minibatches: int
    fault: Fault | None = None
    # minibatches after which it ends: all, or fewer after a request
    ends_after: int = 0
    # it makes no progress from this time on
    hangs_at: float = math.inf
    # number of changes of its end
    version: int = 0
    # of its snapshots, until its worker has run it
    memory: SimulatedMemory | None = None
    is_preempted: bool = False
    # the job as its worker gets it; whether the result stays there
    given: Job | None = None
    is_kept: bool = False

    def done(self, now: float) -> int:
        passed = (min(now, self.hangs_at) - self.began) / self.minibatch_s
        return min(self.num_minibatches, max(0, math.floor(passed + 1e-9)))

    @property
    def ends_at(self) -> float:
        return self.began + self.ends_after * self.minibatch_s


@dataclass
class _Worker:
    index: int
    ready_at: float
    # changes with every process, so that events of a dead process are recognized
    process: int = 0
    running: _Running | None = None
    is_retired: bool = False
    # makes no progress in its next job
    is_hung: bool = False
    # (process, worker of the product)
    production: tuple[int, ProductionWorker] | None = None
    is_quarantined: bool = False
    # keeps results for the exchange
    owner: Owner | None = None


@dataclass(frozen=True)
class Altered:
    """A result that is not that of correct training."""

    # the fault
    what: str
    sent: Vector
    own: Vector | None
    fisher: Any


@dataclass
class History:
    """Observations of all processes of a trial."""

    # first work item of a job -> failures that the coordinator received
    num_failures: Counter[WorkItem] = field(default_factory=Counter)
    # those of workers that the coordinator killed
    num_hangs: Counter[WorkItem] = field(default_factory=Counter)
    # (outer iteration, job, worker, digest) -> result
    altered: dict[tuple[int, int, int, str], Altered] = field(default_factory=dict)
    # digest -> result of a production worker
    trained: dict[str, Altered] = field(default_factory=dict)
    # name -> outer iteration in which it was reported last
    bad_examples: dict[str, int] = field(default_factory=dict)
    # results that were lost with their workers, or damaged in a transfer
    num_lost: int = 0
    # outer iteration -> plans of it that were begun, as (pool, number of the plan)
    plans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


def _key(job: Job) -> tuple[int, int, int]:
    return job.outer_iter, job.job, job.repeat


class FaultyPool:
    """Workers on the clock of a world; the faults of the world occur in it."""

    def __init__(self, world: World, scenario: Scenario, task: SimulatedTask, request: PoolRequest,
                 on_wait: Callable[[Fault], None], on_submit: Callable[[Job], None],
                 history: History) -> None:
        self.world, self.scenario, self.task, self.request = world, scenario, task, request
        self.settings = request.spec.settings
        self.layout = FlatLayout.of(task.model())
        self._on_wait, self._on_submit = on_wait, on_submit
        self._history = history
        self._restarts = Restarts(scenario.max_restarts, world.clock)
        # (time, number, effect)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._outcomes: list[Outcome] = []
        # first work item of a job -> workers that died
        self._crashes: Counter[WorkItem] = Counter()
        # (outer iteration, job, repetition) -> the attempt that the coordinator waits for
        self._current: dict[tuple[int, int, int], Job] = {}
        # (outer iteration, job, repetition) -> the result that the coordinator has
        self._delivered: dict[tuple[int, int, int], JobResult] = {}
        # (outer iteration, job) -> attempt whose failure the coordinator received last
        self._last_failure: dict[tuple[int, int], int] = {}
        # (outer iteration, job, plan) -> how the job diverges
        self._diverging: dict[tuple[int, int, int], str] = {}
        self._book = SnapshotBook(SimulatedMemories() if scenario.has_workers and takes_snapshots(self.settings) else None)
        self._exchange = Exchange("simulated", codec=self.settings.cluster.codec) if scenario.has_exchange else None
        # vector -> digest, of published ones
        self._digests: dict[int, int] = {}
        self._refs: set[SimulatedRef] = set()
        self._num_allocated = 0
        self._workers: list[_Worker] = []
        self.is_closed = False

    def start(self) -> None:
        self._workers = [_Worker(index, self.world.now + self._start_s(), next(self._numbers))
                         for index in range(self.settings.cluster.num_workers)]
        ready = max(worker.ready_at for worker in self._workers)
        timeout_s = self.settings.cluster.wait_for_workers_s
        if ready - self.world.now > timeout_s:
            self.world.advance(timeout_s)
            raise ClusterError(f"not all workers were ready after cluster.wait_for_workers_s = {timeout_s:g}; reduce "
                               "cluster.num_workers, or raise the timeout.")
        self.world.advance(ready - self.world.now)

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        self._num_allocated += 1
        write(vector := np.empty(self.layout.size, np.float32))
        self._refs.add(ref := SimulatedRef(vector))
        self._digests[id(ref)] = digest(vector)
        return ref

    def release(self, ref: VectorRef) -> None:
        if not isinstance(ref, SimulatedRef):
            return
        # releasing again is harmless until the memory is used for another vector
        if ref.released_at is not None and ref.released_at != self._num_allocated:
            self.world.report("a vector was released twice")
        ref.released_at = self._num_allocated
        ref.vector = np.full_like(ref.vector, np.nan)
        self._refs.discard(ref)

    def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo) -> bool:
        for result in results:
            if result.sent.is_here and digest(result.sent.read()) != result.digest:
                self.world.report(f"a damaged result of outer iteration {result.job.outer_iter} was averaged")
        self.world.phase = "averages"
        for fault in self._due("mean"):
            if fault.what == "lose results":
                lost = results[:max(1, int(fault.value * len(results)))]
                for one in lost:
                    self._delivered.pop(_key(one.job), None)
                raise ResultsLost([JobFailure(one.job, one.worker, "its result is lost", True, from_outside=True)
                                   for one in lost])
        if self._exchange is None:
            return False
        try:
            return self._exchange.step(optimizer, results, weights, info, self._ask, self._why_lost)
        finally:
            # of a worker that died, or a group that failed
            self._exchange.news()

    def _ask(self, questions: Mapping[int, Any], timeout_s: float, when_lost: Callable[[], None]) -> dict[int, object]:
        """Return the answers of the workers; one that is silent is killed."""
        asked = {number: self._workers[number] for number in questions}
        owners = {number: worker.owner for number, worker in asked.items() if worker.owner}
        faults = {number: fault for number in asked for fault in self._due("exchange")}
        for number, fault in faults.items():
            self.world.note("exchange", number, fault.what)
        if all(isinstance(question, StepRequest) for question in questions.values()):
            answers = steps(questions, owners, faults)
        else:
            answers = {number: _fetched(owners[number], question, faults.get(number)) for number, question in questions.items()}
        if any(fault.what == "coordinator" for fault in faults.values()):
            # the owners have the next state, and the coordinator has not
            self.world.kill()
        is_silent = any(fault.what == "silent" for fault in faults.values())
        self.world.advance(timeout_s if is_silent else _LATENCY_S)
        for number, worker in asked.items():
            if answers.get(number) is None:
                is_killed = faults[number].what == "silent"
                self._die(worker, "gave no answer and was killed" if is_killed else "killed by SIGKILL", from_outside=is_killed)
                when_lost()
        return {number: answer for number, answer in answers.items() if answer is not None}

    def _fetch(self, kept: RemoteResultRef) -> Vector:
        if not (lost := self._why_lost(kept)):
            assert self._exchange
            answer = self._ask({kept.worker: FetchRequest(kept.identity)}, self._exchange.limit_s(self.layout.size), lambda: None)
            if isinstance(vector := answer.get(kept.worker), np.ndarray):
                if any(fault.what == "damage" for fault in self.world.occurred):
                    # it may have to be trained again
                    self._lose(kept)
                return vector
            lost = self._why_lost(kept) or Ending("its process is gone")
        raise ClusterError(lost.reason, failure=lost.kind)

    def _why_lost(self, kept: RemoteResultRef) -> Ending | None:
        worker = self._workers[kept.worker]
        if not worker.is_retired and str(worker.process) == kept.process:
            return None
        self._lose(kept)
        return Ending("killed by SIGKILL, and its result with it")

    def _lose(self, kept: RemoteResultRef) -> None:
        """Note that the coordinator may not have a result any more."""
        self._history.num_lost += 1
        self._delivered.pop((*kept.identity[:2], 0), None)

    def num_idle(self) -> int:
        return sum(map(self._is_idle, self._workers))

    def num_workers_alive(self) -> int:
        return sum(map(self._is_alive, self._workers))

    def has_busy_start(self) -> bool:
        return False

    def retired(self) -> list[Retired]:
        return self._restarts.news()

    def idle_workers(self) -> list[int]:
        return [worker.index for worker in self._workers if self._is_idle(worker)]

    def workers_alive(self) -> list[int]:
        return [worker.index for worker in self._workers if self._is_alive(worker)]

    def worker_of(self, job: Job) -> int:
        return next((worker.index for worker in self._workers if worker.running and worker.running.job is job), -1)

    def identity_of(self, worker: int) -> WorkerIdentity:
        return WorkerIdentity(f"worker {worker}", f"host-{worker // 2}")

    def quarantine(self, worker: int) -> str:
        self.world.note("quarantine", worker)
        one = self._workers[worker]
        one.is_quarantined = True
        self._after(_LATENCY_S, self._for_process(one, lambda: self._die(one, QUARANTINED, from_outside=True)))
        self._outcomes = [distrusted(outcome, worker) for outcome in self._outcomes]
        return "It is not used again"

    def submit(self, job: Job) -> None:
        idle = self.idle_workers()
        self.submit_to(job, min(idle, key=lambda index: (index != job.job % len(self._workers), index)))

    def submit_to(self, job: Job, worker: int) -> None:
        self.world.note("submit", *job.identity)
        if not job.repeat:
            self._on_submit(job)
            known = {name for name, outer_iter in self._history.bad_examples.items()
                     if outer_iter < job.outer_iter - self.settings.outer.overlap}
            is_lost = self._history.num_lost or any(fault.what == "lose results" for fault in self.world.occurred)
            if known - set(job.excluded) and not is_lost:
                self.world.report(f"job {job.job} of outer iteration {job.outer_iter} does not omit {sorted(known)}")
            plans = self._history.plans.setdefault(job.outer_iter, [])
            if (plan := (id(self), job.plan)) not in plans:
                plans.append(plan)
            # a roll-back begins again at 1
            last = self._last_failure.pop((job.outer_iter, job.job), 0)
            if job.attempt <= last and self.settings.failure.on_divergence == "stop":
                self.world.report(f"attempt {job.attempt} began after attempt {last} had failed")
        number = len(self._history.plans.get(job.outer_iter, ()))
        self.world.phase = ("audits" if job.repeat else "repeats an outer iteration" if number > 1 else
                            "jobs run" if job.attempt == 1 else "repeats a job")
        self._num_allocated += 1
        self._begin(job, self._workers[worker])

    def _begin(self, job: Job, worker: _Worker) -> None:
        size = work_size(job, self.task)
        pace = 1.0 + 0.3 * (worker.index % 3)
        self._current[_key(job)] = job
        self._delivered.pop(_key(job), None)
        running = _Running(job, self.world.now, self.scenario.minibatch_s * pace, size, ends_after=size,
                           memory=None if job.repeat else self._book.lend(job, worker.index))
        worker.running = running
        if self._exchange:
            self._lend(worker, running)
        if worker.is_hung:
            running.hangs_at, worker.is_hung = self.world.now, False
        self._schedule_end(worker, running)
        poison = {(fault.at, int(fault.value)): fault for fault in self.world.lasting("shard")}
        for fault in [poison[place] for place in {(piece.shard.archive, piece.shard.frame) for piece in job.pieces} & set(poison)]:
            self.world.occur(fault)
            self._begin_fault(worker, running, replace(fault, what="kill", value=0.5))
        for fault in self._due("job"):
            self._begin_fault(worker, running, fault)

    def _lend(self, worker: _Worker, running: _Running) -> None:
        """Let a worker start from the model that it gathered, and keep the result."""
        job = running.job
        assert self._exchange
        if worker.owner is None or worker.owner.process != str(worker.process):
            worker.owner = Owner(worker.index, worker.process, self.layout)
        worker.owner.make_room(job)
        running.is_kept = self._exchange.is_open(job.outer_iter)
        model = self._exchange.start_of((worker.index, worker.owner.process), job.start.model,
                                        self._digests.get(id(job.start.model)))
        running.given = replace(job, start=replace(job.start, model=model))

    def wait(self, timeout_s: float) -> Outcome | None:
        if self.world.counts["wait"] > MAX_WAITS:
            raise NoProgressError(f"the run did not end within {MAX_WAITS} polls")
        for fault in self._due("wait"):
            self._poll_fault(fault)
        until = self.world.now + timeout_s
        while not self._outcomes:
            if not self._events or self._events[0][0] > until:
                self.world.advance(max(0.0, until - self.world.now))
                return None
            at, _, happen = heapq.heappop(self._events)
            self.world.advance(max(0.0, at - self.world.now))
            happen()
        outcome = self._outcomes.pop(0)
        self.world.note("outcome", type(outcome).__name__, *outcome.job.identity, outcome.worker)
        return outcome

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        return {worker.index: (worker.running.job.identity, worker.running.done(self.world.now))
                for worker in self._workers if worker.running}

    def kill(self, worker: int, reason: str) -> None:
        self.world.note("kill", worker)
        self._require_hung(self._workers[worker])
        self._after(_LATENCY_S, self._for_process(self._workers[worker], lambda: self._die(
            self._workers[worker], reason, from_outside=True)))

    def stop_jobs(self, outer_iter: int) -> None:
        self.world.note("stop jobs")
        for worker in self._workers:
            running = worker.running
            if running and running.hangs_at == math.inf and running.job.outer_iter == outer_iter:
                running.ends_after = min(running.ends_after, running.done(self.world.now) + 1)
                self._schedule_end(worker, running)

    def abandon(self) -> None:
        for worker in self._workers:
            worker.running = None

    def close(self) -> None:
        self.is_closed = True

    def _require_hung(self, worker: _Worker) -> None:
        """Report a kill of a worker that makes progress: slow workers are kept."""
        running, timeout_s = worker.running, self.settings.failure.hang_timeout_s
        num_stops = sum("stopped" in fault.what for fault in self.world.occurred)
        # of a time in which the coordinator was stopped, at most a second may count, or half of a
        # short timeout
        counted_s = num_stops * min(1.0, max(0.4, timeout_s / 2)) + 0.3
        if running and running.hangs_at == math.inf and 2 * running.minibatch_s + counted_s < timeout_s:
            self.world.report("a worker was killed although it made progress")

    def num_unreleased(self) -> int:
        """Vectors that nobody released."""
        return len(self._refs)

    def _due(self, where: str) -> list[Fault]:
        if self.world.is_dead:
            raise Killed
        return self.world.due(where)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.world.now + seconds, next(self._numbers), happen))

    def _for_process(self, worker: _Worker, happen: Callable[[], None]) -> Callable[[], None]:
        """Return an event that does nothing if the process is gone by then."""
        process = worker.process

        def guarded() -> None:
            if worker.process == process and not worker.is_retired:
                happen()
        return guarded

    def _start_s(self) -> float:
        """Seconds until a process that starts now is ready."""
        seconds = _REPLACE_S
        for fault in self._due("start"):
            seconds += fault.value
        return seconds

    def _is_idle(self, worker: _Worker) -> bool:
        return self._is_alive(worker) and worker.running is None

    def _is_alive(self, worker: _Worker) -> bool:
        return not worker.is_retired and not worker.is_quarantined and worker.ready_at <= self.world.now

    def _schedule_end(self, worker: _Worker, running: _Running) -> None:
        running.version = version = running.version + 1

        def end() -> None:
            if worker.running is running and running.version == version and running.hangs_at == math.inf:
                self._finish(worker, running)
        self._after(max(0.0, running.ends_at - self.world.now), self._for_process(worker, end))

    def _begin_fault(self, worker: _Worker, running: _Running, fault: Fault) -> None:
        """Let a fault happen to a job that was just submitted."""
        duration = running.ends_at - self.world.now
        at = fault.value * duration
        if fault.what in ("kill", "exception", "preempt", "damaged archive", "torn snapshot"):
            def break_off() -> None:
                if worker.running is running:
                    self._break(worker, running, fault.what)
            self._after(at, self._for_process(worker, break_off))
        elif fault.what == "hang":
            running.hangs_at = self.world.now + at
        elif fault.what == "slow":
            running.minibatch_s *= 1.0 + fault.value
            self._schedule_end(worker, running)
        else:
            running.fault = fault

    def _break(self, worker: _Worker, running: _Running, how: str) -> None:
        job = running.job
        if how in ("kill", "torn snapshot"):
            self._run_until_death(worker, running, is_torn=how == "torn snapshot")
            self._die(worker, "killed by SIGKILL")
        elif how == "preempt":
            running.is_preempted = True
            running.num_minibatches = running.done(self.world.now) + 1
            running.ends_after = min(running.ends_after, running.num_minibatches)
            self._schedule_end(worker, running)
        else:
            self._run_until_death(worker, running)
            worker.running = None
            error = DamagedArchiveError(f"archive {job.shard.archive} is damaged; restore it and resume.",
                                        job.shard.archive) if how == "damaged archive" else None
            self._deliver(JobFailure(job, worker.index, str(error or "RuntimeError: simulated"), False, error))

    def _die(self, worker: _Worker, reason: str, *, from_outside: bool = False) -> None:
        """End a worker process; another one replaces it."""
        running, worker.running = worker.running, None
        if running:
            self._run_until_death(worker, running)
            self._book.failed(running.job, worker.index, is_gone=not worker.is_quarantined)
        worker.process = next(self._numbers)
        worker.is_hung = False
        if not worker.is_quarantined and self._restarts.allow(worker.index, reason):
            worker.ready_at = self.world.now + self._start_s()
        else:
            worker.is_retired = True
            if all(one.is_retired for one in self._workers):
                raise self._restarts.none_left(reason)
        if running:
            self._deliver(JobFailure(running.job, worker.index, reason, True, from_outside=from_outside))

    def _finish(self, worker: _Worker, running: _Running) -> None:
        """Train the job, and send its result."""
        worker.running, what = None, running.fault.what if running.fault else ""
        value = running.fault.value if running.fault else 0.0
        result = self._result(worker, running)
        if what == "not finite":
            result = self._not_finite(result)
        if running.is_kept and not running.is_preempted:
            assert worker.owner
            with worker.owner.active():
                kept = worker.owner.keep(replace(result, job=running.given or running.job))
            result = remote(replace(kept, job=running.job), self._fetch)
            self.world.covered.add(("kept result", self.world.phase))
        result = replace(result, encoded=None)

        def arrive() -> None:
            if worker.running is running:
                worker.running = None
            self._deliver(result)
        copy = _copy(result)

        def arrive_again() -> None:
            # a message has its own memory
            self._deliver(copy, is_copy=True)
        if what in ("lost", "late"):
            # the worker waits for an acknowledgment that never comes, or comes late
            worker.running, running.hangs_at = running, self.world.now
        if what == "damage" and result.sent.is_here:
            vector = result.sent.read()
            place = min(int(value * len(vector)), len(vector) - 1)
            vector.view(np.uint32)[place] ^= np.uint32(1 << 22)
        if what != "lost":
            self._after(value if what == "late" else _LATENCY_S, arrive)
        if what == "duplicate":
            self._after(value, arrive_again)
        elif what == "kill after":
            # dies after its message was sent
            self._after(2 * _LATENCY_S, self._for_process(worker, lambda: self._die(worker, "killed by SIGKILL")))

    def _production(self, worker: _Worker, job: Job) -> ProductionWorker:
        self.task.current = job.outer_iter, job.job
        if worker.production is None or worker.production[0] != worker.process:
            worker.production = worker.process, ProductionWorker(self.request.spec, worker.index)
        return worker.production[1]

    def _run_until_death(self, worker: _Worker, running: _Running, *, is_torn: bool = False) -> None:
        """Leave the snapshots that a job has taken so far."""
        memory, running.memory = running.memory, None
        if memory is None:
            return
        production = self._production(worker, running.job)
        production.run_until(running.job, memory, running.minibatch_s, dies_after=running.done(self.world.now))
        if memory.newest()[0] and is_torn:
            memory.damage()

    def _worked(self, worker: _Worker, running: _Running, job: Job) -> JobResult:
        """Run the job in a production worker."""
        production = self._production(worker, job)
        memory, running.memory = running.memory, None
        result = production.run_until(job, memory, running.minibatch_s, ends_after=running.ends_after,
                                      is_leaving=running.is_preempted)
        assert result is not None
        if result.continued_at:
            self.world.covered.add(("continued job", self.world.phase))
            # a stop is noticed after a minibatch
            ends_after = max(running.ends_after, result.continued_at + 1)
            again = production.run_until(job, None, running.minibatch_s, ends_after=ends_after)
            if again is None or again.digest != result.digest or again.remainder != result.remainder:
                self.world.report(f"job {job.job} of outer iteration {job.outer_iter} has another result after its snapshot of "
                                  f"minibatch {result.continued_at}")
        sent = SimulatedRef(result.sent.read())
        own = None if result.own is None else sent if result.own.read() is sent.vector else SimulatedRef(result.own.read())
        self._history.trained[f"{result.digest:016x}"] = Altered("", sent.vector.copy(), None if own is None else
                                                                 own.vector.copy(), None)
        result = replace(result, sent=sent, own=own, exact=(), seconds=result.num_minibatches * running.minibatch_s)
        if altered := self._compute_wrongly(worker, running, sent.vector):
            result = replace(result, digest=digest(sent.vector), objf=-10.0 if altered == "diverged" else result.objf)
            self._note_altered(result, altered)
        return result

    def _result(self, worker: _Worker, running: _Running) -> JobResult:
        if worker.owner is None:
            return self._trained(worker, running, running.job)
        with worker.owner.active():
            return replace(self._trained(worker, running, running.given or running.job), job=running.job)

    def _trained(self, worker: _Worker, running: _Running, job: Job) -> JobResult:
        if self.scenario.has_workers:
            return self._worked(worker, running, job)
        start, end, remainder, fisher = train_job(job, self.layout, running.ends_after, self.task)
        altered = self._compute_wrongly(worker, running, end)
        if not np.isfinite(end).all():
            self.world.report(f"job {job.job} of outer iteration {job.outer_iter} read memory that was released")
        # a worker that diverged silently reports a good value
        objf = -0.01 if altered == "diverged silently" else objective(end)
        end = end - start if job.returns == "move" or job.start.codec else end
        pieces = self.layout.fragment(*job.send)
        own: SimulatedRef | None
        encoded = None
        if job.start.codec is not None:
            vector = np.zeros_like(end)
            if np.isfinite(end).all():
                before = None if job.start.own is None else job.start.own.read()
                encoded, _ = compress(end, before, job.start.codec, self.layout, vector)
            if job.returns == "parameters":
                end += job.start.model.read()
            sent, own = SimulatedRef(end), SimulatedRef(vector)
        elif job.send == (0, 1):
            sent = SimulatedRef(end)
            own = sent if job.keep_own else None
        else:
            part = np.empty(sum(source.stop - source.start for _, source in pieces), np.float32)
            for target, source in pieces:
                part[source] = end[target]
            sent = SimulatedRef(part)
            own = SimulatedRef(end) if job.keep_own else None
        done = running.ends_after
        result = JobResult(job, worker.index, sent, digest(sent.read()), EXAMPLES * done, done, objf, 0.0,
                           done * running.minibatch_s, 0.0, 0.0, 0, own=own, fisher=fisher, remainder=remainder, encoded=encoded)
        if altered:
            self._note_altered(result, altered)
        return replace(result, bad_batches=self._bad_batches(job))

    def _bad_batches(self, job: Job) -> tuple[BadBatch, ...]:
        """Minibatches with the bad examples of the trial, unless the job omits them."""
        bad = {f"example-{fault.at}": fault for fault in self.world.lasting("example")}
        found = [(piece, name) for piece in job.pieces if (name := f"example-{piece.shard.archive}") in bad
                 and name not in job.excluded]
        for _, name in found:
            self.world.occur(bad[name])
        return tuple(BadBatch(piece.shard, piece.first, INPUT, (name,)) for piece, name in found)

    def _note_altered(self, result: JobResult, what: str) -> None:
        own = None if result.own is None else result.own.read().copy()
        self._history.altered[result.job.outer_iter, result.job.job, result.worker, f"{result.digest:016x}"] = Altered(
            what, result.sent.read().copy(), own, result.fisher)

    def _compute_wrongly(self, worker: _Worker, running: _Running, end: Vector) -> str:
        """Alter a result, and return how: of a faulty worker, or of a job that diverges."""
        found = self._divergence(running)
        if found:
            end += np.float32(_DIVERGED)
        for fault in self.world.lasting("worker"):
            if fault.at == worker.index:
                # the same bit every time, or others
                at = int(fault.value) if fault.what == "wrong bit" else next(self._numbers)
                end.view(np.uint32)[at % len(end)] ^= np.uint32(1 << at % 20)
                self.world.occur(fault)
                found = found or fault.what
        return found

    def _divergence(self, running: _Running) -> str:
        """How a job diverges: the same in each attempt and repetition of one plan."""
        job = running.job
        found = running.fault.what if running.fault and running.fault.what.startswith("diverged") else ""
        for fault in self.world.lasting("iteration"):
            if fault.at == job.outer_iter and len(self._history.plans.get(job.outer_iter, [])) <= fault.value:
                self.world.occur(fault)
                found = fault.what
        return self._diverging.setdefault((job.outer_iter, job.job, job.plan), found)

    def _not_finite(self, result: JobResult) -> JobResult:
        vector = result.sent.read()
        vector[0] = np.nan
        result = replace(result, digest=digest(vector),
                         rejection_reason=not_finite(vector, self.layout, self.layout.fragment(*result.job.send)))
        self._note_altered(result, "not finite")
        return result

    def _deliver(self, outcome: Outcome, *, is_copy: bool = False) -> None:
        """Give an outcome to the coordinator.

        Like other pools, it drops results of attempts that were reported as failed. If the job has
        another result already, the coordinator receives it and must recognize the duplicate.
        """
        if self._workers[outcome.worker].is_quarantined:
            outcome = distrusted(outcome, outcome.worker)
        job = outcome.job
        key = _key(job)
        is_current = self._current.get(key) is job
        if is_current:
            del self._current[key]
        elif isinstance(outcome, JobFailure):
            return
        elif not is_copy:
            self.world.note("zombie", *job.identity)
            for ref in (outcome.sent, outcome.own):
                if isinstance(ref, SimulatedRef) and ref.released_at is None:
                    self.release(ref)
            if key not in self._delivered:
                return
        elif key not in self._delivered and self._current.get(key, job).plan == job.plan:
            return
        if is_current and not (isinstance(outcome, JobFailure) and outcome.worker_died):
            self._book.ended(outcome)
        if isinstance(outcome, JobFailure):
            self._note_failure(outcome)
        elif is_current:
            self._note_result(outcome)
        self._outcomes.append(outcome)

    def _note_result(self, result: JobResult) -> None:
        job = result.job
        self._delivered[_key(job)] = result
        # the coordinator takes both for a failed attempt
        is_failed = bool(result.remainder) or (result.sent.is_here and digest(result.sent.read()) != result.digest)
        self._history.num_failures[job.pieces[0]] += is_failed and not job.repeat
        if not is_failed:
            self._history.bad_examples |= {name: job.outer_iter for bad in result.bad_batches for name in bad.examples}
        self._refs |= {ref for ref in (result.sent, result.own) if isinstance(ref, SimulatedRef)}

    def _note_failure(self, failure: JobFailure) -> None:
        job = failure.job
        if job.repeat:
            return
        self._history.num_failures[job.pieces[0]] += 1
        self._history.num_hangs[job.pieces[0]] += failure.from_outside
        self._last_failure[job.outer_iter, job.job] = job.attempt
        self._crashes[job.pieces[0]] += failure.worker_died and not failure.from_outside
        most, crashes = self.settings.failure.max_attempts, self._crashes[job.pieces[0]]
        # a roll-back begins again
        if crashes > most and not any(fault.what.startswith(("diverged", "not finite")) for fault in self.world.occurred):
            self.world.report(f"{job.pieces[0]} killed {crashes} workers of one process, and failure.max_attempts is {most}")

    def _poll_fault(self, fault: Fault) -> None:
        """Let a fault happen while the coordinator waits."""
        if fault.what == "kill idle":
            self._kill_some(lambda worker: worker.running is None and worker.ready_at <= self.world.now, int(fault.value))
        elif fault.what == "kill all":
            self._kill_some(lambda worker: True, len(self._workers))
        elif fault.what == "hang idle":
            self._workers[int(fault.value) % len(self._workers)].is_hung = True
        elif fault.what == "coordinator stopped":
            # its workers continue meanwhile
            self.world.advance(fault.value)
        elif fault.what == "machine stopped":
            self._shift(fault.value)
        else:
            self._on_wait(fault)

    def _kill_some(self, is_meant: Callable[[_Worker], bool], count: int) -> None:
        for worker in [one for one in self._workers if not one.is_retired and is_meant(one)][:count]:
            self._die(worker, "killed by SIGKILL")

    def _shift(self, seconds: float) -> None:
        """Stop all processes together for some time."""
        self.world.advance(seconds)
        self._events = [(at + seconds, number, happen) for at, number, happen in self._events]
        for worker in self._workers:
            worker.ready_at += seconds
            if worker.running:
                worker.running.began += seconds
                worker.running.hangs_at += seconds


def _fetched(owner: Owner, question: FetchRequest, fault: Fault | None) -> Vector | None:
    """The vector that a worker sends; None if it ends before."""
    if fault and fault.what in ("kill", "silent"):
        return None
    vector = owner.fetch(question.identity).copy()
    if fault and fault.what == "damage":
        vector.view(np.uint32)[0] ^= 1
    return vector


def _copy(result: JobResult) -> JobResult:
    """Return a result as another message contains it."""
    if not result.sent.is_here:
        return result
    sent = SimulatedRef(result.sent.read().copy())
    own = None if result.own is None else sent if result.own is result.sent else SimulatedRef(result.own.read().copy())
    return replace(result, sent=sent, own=own)
