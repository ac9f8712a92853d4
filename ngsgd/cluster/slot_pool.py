"""A pool of worker slots: what a pool of local processes and one of Ray actors have in common.

If the process of a slot dies, its job is reported as failed, and another process starts while the
other workers continue. Every wait has a deadline. Time during which this process was stopped does
not count (`ngsgd.training.clocks`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from ngsgd import process_identity
from ngsgd.cluster import restarts
from ngsgd.cluster.exchange import shared_memory
from ngsgd.cluster.exchange.collective import FetchRequest, RemoteResultRef, StepRequest
from ngsgd.cluster.exchange.collective_client import Ending, Exchange, RemoteRef, remote
from ngsgd.cluster.exchange.selection import unpacked
from ngsgd.cluster.exchange.shared_memory import SharedRef, SharedSnapshotMemory, SharedVectors
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.process import Activity
from ngsgd.cluster.restarts import Restarts, distrusted, none_agrees
from ngsgd.counting import counted
from ngsgd.errors import ClusterError, FailureKind
from ngsgd.interface import option
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.training.auditing.pool import QUARANTINED, WorkerIdentity
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker_pool import Retired
from ngsgd.training.worker_wait import AwakeClock, WorkerWait

_POLL_S = 0.2  # interval of the check for processes that hang
_END_S = 5.0  # time for a killed process to end


@dataclass(kw_only=True)
class Slot:
    """One worker: its process, and its current job."""

    index: int
    fingerprint: Fingerprint | None = None  # None until it can take jobs
    leaving: bool = False  # its process was asked to end, and accepts no more jobs
    told_to_stop: bool = False  # the current job was asked to stop
    job: Job | None = None
    places: tuple[SharedRef, ...] = ()
    ending: Ending | None = None  # of the process, if it is known before the process has ended
    killed: float | None = None  # time on the pool's clock at which this pool killed the process
    is_collateral: bool = False  # killed with its hung fork server, which is no failed start
    predecessor: Ending | None = None  # of the process before this one
    retired: bool = False  # it died too often and is not replaced
    refused: str = ""  # differences of its fingerprint from that of the run
    is_quarantined: bool = False  # the audit found it at fault: it is not replaced
    activity: Activity | None = None  # while it starts
    deaths: list[str] = field(default_factory=list)  # consecutive deaths during the start

    @property
    def ready(self) -> bool:
        return self.fingerprint is not None

    @property
    def is_idle(self) -> bool:
        return self.is_usable and self.job is None

    @property
    def is_usable(self) -> bool:
        return self.fingerprint is not None and not (self.leaving or self.retired or self.is_quarantined)


S = TypeVar("S", bound=Slot)


class SlotPool(ABC, Generic[S]):
    """A `WorkerPool` and `AuditablePool` of processes, for a model of `size` parameters."""

    def __init__(self, spec: TaskSpec, num_workers: int, num_threads: int, size: int, agreement: Agreement | None,
                 report: Callable[[str], object]) -> None:
        self.spec, self.num_workers, self.num_threads = spec, num_workers, num_threads
        self.agreement = agreement or Agreement()
        self.num_discarded = 0  # late or duplicate results
        self._report = report
        self._vectors = SharedVectors(size)
        self._cells = SharedVectors(2 * num_workers)
        self._snapshots = shared_memory.snapshot_book(spec.settings)
        self._slots: list[S] = []
        self._outcomes: list[Outcome] = []
        self._digests: dict[SharedRef, int] = {}  # of published vectors, for the exchange
        self._kept: dict[int, RemoteRef] = {}  # results that workers keep, by id(...)
        self._answers: dict[int, object] = {}  # worker -> its answer to the current question
        self._clock = AwakeClock()
        # until all workers were ready, or time for that is over, an unsuitable one is an error
        self._start_ends_s = math.inf
        self._restarts = Restarts(restarts.MAX_RESTARTS_PER_HOUR)
        # of workers that take the outer step, and whether those of today do
        self._exchange: Exchange | None = None
        self._averages = True
        self._keeps_logs = False  # a message refers to them

    # A pool fills in ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def advice(self) -> str:
        """Next step where workers cannot start."""

    @abstractmethod
    def _new_slot(self, index: int, deaths: Sequence[str] = ()) -> S:
        """Begin to start a process; the deaths are those of its predecessors."""

    @abstractmethod
    def _post(self, slot: S, job: Job, snapshots: SharedSnapshotMemory | None, *, keep: bool) -> None:
        """Send a job; its result belongs into `slot.places`, or with `keep` stays there."""

    @abstractmethod
    def _request(self, slot: S, question: StepRequest | FetchRequest) -> None:
        """Ask an idle worker; the answer belongs into `_answers`."""

    @abstractmethod
    def _ask_to_stop(self, slot: S) -> None:
        """Ask a worker to end its job after the current minibatch."""

    @abstractmethod
    def _kill(self, slot: S) -> None:
        """Send SIGKILL."""

    @abstractmethod
    def _process_events(self, timeout_s: float) -> None:
        """Wait for an event of a process, and process it."""

    @abstractmethod
    def _end(self, slot: S) -> tuple[Ending, bool]:
        """Kill a process; return how it ended, and whether it certainly writes no more."""

    @abstractmethod
    def _process_id(self, slot: S) -> int:
        """Process id; 0 if it is not known."""

    @abstractmethod
    def _host(self, slot: S) -> str:
        """Host name."""

    @abstractmethod
    def _activity(self, slot: S) -> Activity | None:
        """The activity of a process that starts; None if it is not known."""

    def _is_here(self, slot: S) -> bool:
        """Whether a process shares memory with this one."""
        return True

    def _shares_memory(self, slot: S) -> bool:
        """Whether vectors pass through shared memory to and from a process."""
        return self._is_here(slot)

    def _why_few(self) -> str:
        """Reason for missing workers, for an error."""
        return ", and no other one was busy"

    def _last_words(self, slot: S) -> str:
        return ""

    # Workers --------------------------------------------------------------------------------------

    @property
    def _is_starting(self) -> bool:
        return self._clock.now < self._start_ends_s

    def _start_workers(self, num_needed: int) -> None:
        """Start all workers, and wait until `num_needed` are ready; the others join later."""
        self._heartbeats = self._cells.allocate()
        self._slots = [self._new_slot(index) for index in range(self.num_workers)]
        timeout_s = self.spec.settings.cluster.wait_for_workers_s
        wait = WorkerWait(timeout_s, self._report)
        self._clock.catch_up()
        while (up := self.num_workers_alive()) < num_needed:
            if wait.is_over(self._clock.now, up, num_needed, self.num_workers, self.has_busy_start):
                raise ClusterError(f"{up} of {self.num_workers} workers were ready after cluster.wait_for_workers_s = "
                                   f"{timeout_s:g}{self._why_few()}; ask for fewer (cluster.num_workers, or resume with "
                                   f"{option('workers', 'N', 'num_workers')}), or give them more time.")
            self._poll(min(_POLL_S, timeout_s))
        if up < self.num_workers:
            self._start_ends_s = self._clock.now + timeout_s
            self._report(f"training begins with {up} of {counted(self.num_workers, 'worker')}; the others join when they are ready")
        else:
            self._start_ends_s = -math.inf

    def num_idle(self) -> int:
        return len(self.idle_workers())

    def num_workers_alive(self) -> int:
        return len(self.workers_alive())

    def idle_workers(self) -> list[int]:
        return [slot.index for slot in self._slots if slot.is_idle]

    def workers_alive(self) -> list[int]:
        return [slot.index for slot in self._slots if slot.is_usable]

    def worker_of(self, job: Job) -> int:
        return next((slot.index for slot in self._slots if slot.job is job), -1)

    def process_ids(self) -> list[int]:
        """Process ids of the workers, by slot."""
        return [self._process_id(slot) for slot in self._slots if self._process_id(slot) and not slot.retired]

    def identity_of(self, worker: int) -> WorkerIdentity:
        slot = self._slots[worker]
        if slot.fingerprint is None:
            return WorkerIdentity(f"worker {worker}")
        device, host = slot.fingerprint.device, self._host(slot)
        is_cpu = device in ("", "cpu")
        where = f"process {self._process_id(slot)} on {host}" + ("" if is_cpu else f", {device}")
        return WorkerIdentity(f"worker {worker} ({where})", host, slot.fingerprint.digest(), is_reproducible=is_cpu)

    def has_busy_start(self) -> bool:
        found = False
        for slot in self._slots:
            if not slot.ready and not slot.retired and (activity := self._activity(slot)) is not None:
                found |= activity.is_busy(slot.activity)
                slot.activity = activity
        return found

    def retired(self) -> list[Retired]:
        failures = self._exchange.news() if self._exchange else []
        return [*self._restarts.news(), *(Retired(-1, message, "exchange_failed") for message in failures)]

    def quarantine(self, worker: int) -> str:
        slot = self._slots[worker]
        slot.is_quarantined = True
        if not slot.retired:
            self._kill_for(slot, Ending(QUARANTINED, FailureKind.QUARANTINED))
        self._outcomes = [distrusted(outcome, worker) for outcome in self._outcomes]
        return "It is not used again or replaced: its replacement would run on the same hardware"

    def kill(self, worker: int, reason: str) -> None:
        slot = self._slots[worker]
        # a signal from outside is no fault of the job: SIGSTOP, or a debugger
        state, _ = process_identity.state_and_start_time(self._process_id(slot) if self._is_here(slot) else 0)
        self._kill_for(slot, Ending(f"was stopped by a signal, {reason}", FailureKind.STOPPED) if state in ("T", "t")
                       else Ending(reason, FailureKind.HUNG))

    def _kill_for(self, slot: S, ending: Ending) -> None:
        if slot.killed is None:
            slot.ending, slot.killed = ending, self._clock.now
        self._kill(slot)

    def stop_jobs(self, outer_iter: int) -> None:
        for slot in self._slots:
            if slot.job is not None and slot.job.outer_iter == outer_iter:
                slot.told_to_stop = True
                self._ask_to_stop(slot)

    def abandon(self) -> None:
        """Kill the workers that are busy; the pool can only be closed afterwards."""
        for slot in self._slots:
            if slot.job is not None:
                self._kill(slot)

    def close(self) -> None:
        self._slots = []
        self._vectors.close()
        self._cells.close()
        self._snapshots.close()
        if self._exchange:
            self._exchange.close()

    # Jobs -----------------------------------------------------------------------------------------

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        ref = self._vectors.allocate()
        write(ref.read())
        if self._exchange:
            self._digests[ref] = digest(ref.read())
        return ref

    def release(self, ref: VectorRef) -> None:
        self._kept.pop(id(ref), None)
        if isinstance(ref, SharedRef):
            self._digests.pop(ref, None)
            self._vectors.release(ref)

    def submit(self, job: Job) -> None:
        # assign a job to the same slot where possible, so that charts per worker stay comparable
        wanted = job.job % len(self._slots)
        self.submit_to(job, wanted if self._slots[wanted].is_idle else next(slot.index for slot in self._slots if slot.is_idle))

    def submit_to(self, job: Job, worker: int) -> None:
        slot = self._slots[worker]
        slot.job, slot.told_to_stop = job, False
        keep = self._exchange is not None and self._averages and self._exchange.is_open(job.outer_iter)
        num_places = job.num_vectors - keep if self._shares_memory(slot) else 0
        slot.places = tuple(self._vectors.allocate() for _ in range(num_places))
        model, own = job.start.model, job.start.own and self._portable(slot, job.start.own)
        if self._exchange and isinstance(model, SharedRef):
            model = self._exchange.start_of((worker, self._name_of_process(slot)), model, self._digests.get(model))
        # a model that the worker gathered goes nowhere
        start = replace(job.start, model=self._portable(slot, model), own=own)
        snapshots = None if job.repeat else self._snapshots.lend(job, worker)
        self._post(slot, replace(job, start=start), snapshots, keep=keep)

    def _portable(self, slot: S, ref: VectorRef) -> VectorRef:
        """The same vector where the worker can read it."""
        return ref

    def _name_of_process(self, slot: S) -> str:
        return f"{self._host(slot)}/{self._process_id(slot)}"

    def wait(self, timeout_s: float) -> Outcome | None:
        if not self._outcomes:
            self._poll(timeout_s)
        return self._outcomes.pop(0) if self._outcomes else None

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        return {slot.index: (slot.job.identity, self._num_done(slot)) for slot in self._slots if slot.job is not None}

    def _num_done(self, slot: S) -> int:
        """A number that changes while a job makes progress."""
        return int(self._heartbeats.map().view(np.uint64)[slot.index])

    def _poll(self, timeout_s: float) -> None:
        self._clock.tick()
        for slot in self._slots:
            # nothing reports the end of a killed process
            if slot.killed is not None and not slot.retired and self._clock.now - slot.killed > _END_S:
                self._died(slot)
        self._process_events(timeout_s)

    def _admit(self, slot: S, fingerprint: Fingerprint, where: str = "") -> None:
        """Let a process that is ready take jobs, unless it would compute other bits."""
        slot.refused = self._restarts.refusal(slot.index, fingerprint, self.agreement, where, is_starting=self._is_starting)
        if slot.refused:
            slot.ending = Ending(f"was rejected ({slot.refused})")
            self._kill(slot)
            self._died(slot)
        else:
            slot.fingerprint, slot.deaths = fingerprint, []
            if self._exchange:
                self._exchange.next_try = 0
            if math.isfinite(self._start_ends_s) and self.num_workers_alive() == self.num_workers:
                self._start_ends_s = -math.inf
                self._report(f"all {counted(self.num_workers, 'worker')} are ready")

    def _take(self, slot: S, outcome: Outcome) -> None:
        if slot.is_quarantined:
            # its death follows
            return
        if slot.job is None or outcome.job.identity != slot.job.identity:
            self.num_discarded += 1
            return
        # the job as it was submitted: references are counted by identity
        outcome = replace(outcome, job=slot.job)
        self._outcomes.append(outcome if isinstance(outcome, JobFailure) else self._readable(slot, outcome))
        self._snapshots.ended(outcome)
        if isinstance(outcome, JobFailure):
            self._release_places(slot)
            if self._exchange:
                # it may have failed for want of the model
                self._exchange.forget((slot.index, self._name_of_process(slot)))
        # the job ended early without a request of the pool: its worker received a signal
        elif outcome.remainder and not slot.told_to_stop:
            # its partial result is here, and its machine is needed elsewhere
            slot.leaving = True
            self._kill_for(slot, slot.ending or Ending("was asked to end by a signal", FailureKind.ASKED_TO_END))
        slot.job, slot.places = None, ()

    def _readable(self, slot: S, result: JobResult) -> JobResult:
        """Return a result with references that this process can read."""
        result = remote(result, self._fetch)
        if isinstance(result.sent, RemoteRef):
            self._kept[id(result.sent)] = result.sent
        return unpacked(result)

    def _kept_by(self, slot: S) -> list[RemoteRef]:
        """Results that would end with a worker."""
        return [ref for ref in self._kept.values() if ref.kept.worker == slot.index and not ref.is_here]

    def _died(self, slot: S) -> None:
        """Report the job of a dead worker as failed, and replace the worker."""
        ending, is_gone = self._end(slot)
        job, deaths = slot.job, slot.deaths
        self._release_places(slot, is_gone=is_gone)
        if job is not None:
            # no retry continues from a snapshot of a worker that computes wrong results; those of
            # other machines are written by a process of this one
            self._snapshots.failed(job, slot.index, is_gone=(is_gone or not self._is_here(slot)) and not slot.is_quarantined)
        if not slot.ready and not slot.is_collateral:
            deaths = [*deaths, ending.reason]
            # a worker that cannot start does not end a run that has other workers
            if len(deaths) >= self.spec.settings.failure.max_attempts and (
                    self._start_ends_s == math.inf or not self.num_workers_alive()):
                self._keeps_logs = True
                if slot.refused:
                    raise none_agrees(slot.refused)
                raise ClusterError(f"worker {slot.index} died {len(deaths)} times while starting ({ending.reason}); "
                                   f"{self.advice}{self._last_words(slot)}.", failure=ending.kind)
        if not slot.is_quarantined and self._restarts.allow(slot.index, ending.reason):
            fresh = self._new_slot(slot.index, deaths)
        elif all(other.retired for other in self._slots if other is not slot):
            raise self._restarts.none_left(ending.reason, ending.kind)
        else:
            fresh = replace(slot, retired=True, job=None)
        fresh.predecessor = ending
        self._slots[slot.index] = fresh
        # the coordinator reports the loss of a result
        if job is None and not self._kept_by(slot) and not slot.refused and not fresh.retired:
            when = "while it was idle" if slot.ready else "while it started"
            self._restarts.report("worker_replaced", slot.index, f"worker {slot.index} ended {when} ({ending.reason}) and is "
                                                                 "replaced; no job is lost", ending.kind)
        if job is not None:
            from_outside = slot.killed is not None or ending.kind is FailureKind.FORK_SERVER
            self._outcomes.append(JobFailure(job, slot.index, ending.reason, True, last_words=self._last_words(slot),
                                             from_outside=from_outside, kind=ending.kind))

    def _release_places(self, slot: S, *, is_gone: bool = True) -> None:
        for ref in slot.places:
            # a process that is not gone may still write there
            (self._vectors.release if is_gone else self._vectors.discard)(ref)
        slot.places = ()

    # Exchange -------------------------------------------------------------------------------------

    def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo) -> bool:
        if self._exchange is None:
            return False
        # workers that died while they were idle
        self._poll(0.0)
        return self._exchange.step(optimizer, results, weights, info, self._ask, self._why_lost)

    def _ask(self, questions: Mapping[int, StepRequest | FetchRequest], timeout_s: float,
             when_lost: Callable[[], None] = lambda: None) -> dict[int, object]:
        """Return the answers of idle workers; those that are silent for too long are replaced."""
        self._answers = {}
        asked = {worker: self._slots[worker] for worker in questions}

        def silent() -> list[int]:
            return [worker for worker, slot in asked.items() if worker not in self._answers and self._slots[worker] is slot]
        for worker, question in questions.items():
            self._request(asked[worker], question)
        self._clock.catch_up()
        deadline = self._clock.now + timeout_s
        while silent() and self._clock.now < deadline:
            self._poll(min(_POLL_S, max(0.0, deadline - self._clock.now)))
            if any(self._slots[worker] is not slot for worker, slot in asked.items()):
                when_lost()
        for worker in silent():
            self.kill(worker, f"gave no answer for {timeout_s:.3g} s and was killed")
        while silent():
            self._poll(_POLL_S)
        return self._answers

    def _fetch(self, kept: RemoteResultRef) -> Vector:
        lost = self._why_lost(kept)
        if lost is None:
            assert self._exchange
            answers = self._ask({kept.worker: FetchRequest(kept.identity)}, self._exchange.limit_s(self._vectors.size))
            if isinstance(vector := answers.get(kept.worker), np.ndarray):
                return vector
            lost = self._why_lost(kept) or Ending("")
        raise ClusterError(lost.reason, failure=lost.kind)

    def _why_lost(self, kept: RemoteResultRef) -> Ending | None:
        """How the process that stores a result ended; None while it lives."""
        slot = self._slots[kept.worker]
        if not slot.retired and self._name_of_process(slot) == kept.process:
            return None
        found = slot.predecessor or Ending("its process is gone")
        return replace(found, reason=f"{found.reason}, and its result with it")
