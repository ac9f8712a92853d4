"""A WorkerPool of processes on this machine, with parameters in shared memory.

Deaths are detected immediately. Processes come from a fork server that has already imported torch,
so a replacement is ready in tens of milliseconds. Every wait has a deadline, in case a worker, a
starting worker or the fork server hangs. Time during which this process was stopped does not count
(`ngsgd.training.awake_clock`).
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ngsgd import files, process_identity
from ngsgd.cluster.activity import Activity, activity_of
from ngsgd.cluster.exchange.collective import FetchRequest, GroupFailure, MeanShard, RemoteResultRef, process_name
from ngsgd.cluster.exchange.collective_client import exchange_of, remote
from ngsgd.cluster.exchange.shared_memory import SharedRef, SharedVectors
from ngsgd.cluster.exchange.snapshot_memory import snapshot_book
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.fork_server import ForkedProcess, fork_server, modules_of
from ngsgd.cluster.groups import make_worker
from ngsgd.cluster.messages import Disconnected, Messages
from ngsgd.cluster.restarts import Restarts, check_fingerprint, distrusted, identity, incidents_of, none_agrees
from ngsgd.cluster.worker_process import STOP, JobAssignment, MakeWorker, Ready, WorkerSetup, serve
from ngsgd.errors import ClusterError, NgsgdError
from ngsgd.training.auditing.pool import QUARANTINED, WorkerIdentity
from ngsgd.training.awake_clock import AwakeClock
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, VectorRef
from ngsgd.training.parameter_vector import Mean, Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker_pool import Retired
from ngsgd.training.worker_wait import WorkerWait

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# interval of the check for hung starts
_POLL_S = 0.2
# a start hangs after this many median start times
_PATIENCE = 5.0
# delay before another attempt to start
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 60.0
# lines of the log of a dead worker that a failure quotes
_LAST_LINES = 50
# time for the fork server to report how a process ended
_STATUS_S = 1.0
# time for a killed process to end
_END_S = 5.0
# time for all processes to end with the pool
_CLOSE_S = 2.0


def _nothing() -> None:
    pass


@dataclass
class _Slot:
    """One worker: its process, and its current activity."""

    index: int
    process: ForkedProcess
    messages: Messages
    # seconds that the process waits before it does anything
    delay_s: float = 0.0
    # seconds on the pool's clock; None until the fork server has forked it
    born: float | None = None
    ready: bool = False
    # its process was asked to end, and accepts no more jobs
    leaving: bool = False
    told_to_stop: bool = False  # whether the job was asked to stop
    job: Job | None = None
    places: tuple[SharedRef, ...] = ()
    # reason of the end of the process, if known
    ended_because: str = ""
    # time on the pool's clock at which this pool killed the hung process
    killed: float | None = None
    # killed with its hung fork server; does not count as a failed start
    is_collateral: bool = False
    # how the previous process of this slot ended
    predecessor: str = ""
    # it died too often and is not replaced
    retired: bool = False
    # differences of its fingerprint from that of the run
    refused: str = ""
    # once ready
    fingerprint: Fingerprint | None = None
    # the audit found it at fault: it is not replaced
    is_quarantined: bool = False
    # while it starts
    activity: Activity | None = None
    # consecutive deaths during the start
    deaths: list[str] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return self.is_usable and self.job is None

    @property
    def is_usable(self) -> bool:
        return self.ready and not self.leaving and not self.is_quarantined


class ProcessPool:
    """Long-lived worker processes, one job at a time each."""

    def __init__(self, spec: TaskSpec, num_workers: int, num_threads: int, size: int, *,
                 log_directory: Path | None = None,
                 make_worker: MakeWorker = make_worker, agreement: Agreement | None = None,
                 report: Callable[[str], object] = lambda _line: None) -> None:
        self.spec = spec
        self.num_workers = num_workers
        self.num_threads = num_threads
        self.log_directory = log_directory
        self._report = report
        self.make_worker = make_worker
        self.agreement = agreement or Agreement()
        # late or duplicate results
        self.num_discarded = 0
        self._vectors = SharedVectors(size)
        self._cells = SharedVectors(2 * num_workers)
        self._snapshots = snapshot_book(spec.settings)
        self._slots: list[_Slot] = []
        self._host = socket.gethostname()
        self._outcomes: list[Outcome] = []
        self._start_s: deque[float] = deque(maxlen=64)
        # worker -> its answer to the current question
        self._answers: dict[int, object] = {}
        self._clock = AwakeClock()
        self._fork_server = fork_server()
        # (pending start, time since which it is pending)
        self._under_way: tuple[int | None, float] = (None, 0.0)
        self._is_starting = True
        self._restarts = Restarts(spec.settings.failure.max_restarts_per_hour)
        self._exchange = exchange_of(spec.settings.cluster, "127.0.0.1") if spec.settings.cluster.exchange == "collective" else None

    def start(self) -> None:
        self._heartbeats = self._cells.allocate()
        if self.log_directory:
            self.log_directory.mkdir(parents=True, exist_ok=True)
        self._slots = [self._new_slot(index) for index in range(self.num_workers)]
        timeout_s = self.spec.settings.cluster.wait_for_workers_s
        wait = WorkerWait(timeout_s, self._report)
        self._clock.catch_up()
        while (up := self.num_workers_alive()) < self.num_workers:
            if wait.is_over(self._clock.now, up, self.num_workers, self.num_workers, self.has_busy_start):
                raise ClusterError(f"{up} of {self.num_workers} workers were ready after cluster.wait_for_workers_s = "
                                   f"{timeout_s:g}, and no other one was busy; reduce cluster.num_workers, or wait longer.")
            self._poll(min(_POLL_S, timeout_s))
        self._is_starting = False

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        ref = self._vectors.allocate()
        write(ref.read())
        return ref

    def release(self, ref: VectorRef) -> None:
        if isinstance(ref, SharedRef):
            self._vectors.release(ref)

    def mean(self, results: Sequence[JobResult], weights: Sequence[float]) -> Mean | None:
        if self._exchange is None:
            # the vectors are here already, and memory is faster than any message
            return None
        self._poll(0.0)
        return self._exchange.mean(results, weights, self._ask, self._why_lost)

    def num_idle(self) -> int:
        return sum(slot.is_idle for slot in self._slots)

    def num_workers_alive(self) -> int:
        return sum(slot.is_usable for slot in self._slots)

    def has_busy_start(self) -> bool:
        found = False
        for slot in self._slots:
            if not slot.ready and not slot.retired and slot.process.pid is not None:
                activity = activity_of(slot.process.pid)
                found |= activity is not None and activity.is_busy(slot.activity)
                slot.activity = activity
        return found

    def retired(self) -> list[Retired]:
        return [*self._restarts.news(), *incidents_of(self._exchange)]

    def idle_workers(self) -> list[int]:
        return [slot.index for slot in self._slots if slot.is_idle]

    def workers_alive(self) -> list[int]:
        return [slot.index for slot in self._slots if slot.is_usable]

    def worker_of(self, job: Job) -> int:
        return next((slot.index for slot in self._slots if slot.job is job), -1)

    def identity_of(self, worker: int) -> WorkerIdentity:
        slot = self._slots[worker]
        return identity(worker, slot.process.pid or 0, self._host, slot.fingerprint)

    def quarantine(self, worker: int) -> str:
        slot = self._slots[worker]
        slot.is_quarantined = True
        if not slot.retired and slot.killed is None:
            slot.ended_because, slot.killed = QUARANTINED, self._clock.now
            slot.process.kill()
        self._outcomes = [distrusted(outcome, worker) for outcome in self._outcomes]
        # a replacement would run on the same hardware
        return "It is not used again or replaced: its replacement would run on the same hardware"

    def submit(self, job: Job) -> None:
        # assign a job to the same slot where possible, so that charts per worker stay comparable
        idle = [slot for slot in self._slots if slot.is_idle]
        slot = min(idle, key=lambda s: (s.index != job.job % len(self._slots), s.index))
        self.submit_to(job, slot.index)

    def submit_to(self, job: Job, worker: int) -> None:
        slot = self._slots[worker]
        slot.job, slot.told_to_stop = job, False
        # with an exchange the worker keeps the vector to average
        num_places = job.num_vectors - (self._exchange is not None)
        slot.places = tuple(self._vectors.allocate() for _ in range(num_places))
        # it died a moment ago; the next poll detects that
        with contextlib.suppress(Disconnected):
            slot.messages.post(JobAssignment(job, slot.places, None if job.repeat else self._snapshots.lend(job, slot.index)))

    def wait(self, timeout_s: float) -> Outcome | None:
        if not self._outcomes:
            self._poll(timeout_s)
        return self._outcomes.pop(0) if self._outcomes else None

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        heartbeats = self._heartbeats.map().view(np.uint64)
        return {slot.index: (slot.job.identity, int(heartbeats[slot.index]))
                for slot in self._slots if slot.job is not None}

    def kill(self, worker: int, reason: str) -> None:
        slot = self._slots[worker]
        # a signal from outside is no fault of the job: SIGSTOP, or a debugger
        state, _ = process_identity.state_and_start_time(slot.process.pid or 0)
        stopped = slot.killed is None and state in ("T", "t")
        slot.ended_because = f"was stopped by a signal, {reason}" if stopped else reason
        slot.killed = self._clock.now if slot.killed is None else slot.killed
        slot.process.kill()

    def stop_jobs(self, outer_iter: int) -> None:
        for slot in self._slots:
            if slot.job is not None and slot.job.outer_iter == outer_iter:
                slot.told_to_stop = True
                with contextlib.suppress(Disconnected):
                    slot.messages.post(STOP)

    def abandon(self) -> None:
        for slot in self._slots:
            if slot.job is not None:
                slot.process.kill()

    def close(self) -> None:
        for slot in self._slots:
            slot.process.kill()
        deadline = time.monotonic() + _CLOSE_S
        for slot in self._slots:
            code = slot.process.exit_code(max(0.0, deadline - time.monotonic()))
            if code is None and not slot.process.is_orphan and not slot.process.failure:
                # it hangs, and would stay
                self._fork_server.end()
            slot.messages.close()
        self._slots = []
        self._vectors.close()
        self._cells.close()
        self._snapshots.close()
        if self._exchange:
            self._exchange.close()

    def process_ids(self) -> list[int]:
        """Process ids of the workers, by slot."""
        return [slot.process.pid or 0 for slot in self._slots]

    def _new_slot(self, index: int, deaths: Sequence[str] = ()) -> _Slot:
        """Start a worker as a replacement; the delay grows with the number of failed starts."""
        delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (len(deaths) - 1)) if deaths else 0.0
        ours, theirs = socket.socketpair()
        log = str(self.log_directory / f"worker-{index}.log") if self.log_directory else ""
        messages = Messages(ours)
        messages.post(WorkerSetup(self.spec, index, self.num_threads, self._heartbeats, log,
                                  self.make_worker, delay_s, self.agreement.has_kernels))
        process = self._fork_server.launch(serve, (theirs,), theirs, f"ngsgd worker {index}",
                                           modules_of(self.spec, self.make_worker))
        return _Slot(index, process, messages, delay_s, deaths=list(deaths))

    def _poll(self, timeout_s: float) -> None:
        """Wait for an event, and process all events."""
        self._clock.tick()
        self._end_starts_that_hang()
        # the fork server or the kernel hangs, and does not report the end of a killed worker
        for slot in filter(_is_there, self._slots):
            if slot.killed is not None and self._clock.now - slot.killed > _END_S:
                self._died(slot)
        with selectors.PollSelector() as selector:
            for slot in filter(_is_there, self._slots):
                selector.register(slot.messages,
                                  _READ | _WRITE if slot.messages.has_unsent else _READ, slot)
            happened = [key.data for key, _ in selector.select(timeout_s)]
        for slot in happened:
            # otherwise the death of another worker ended this one
            if self._slots[slot.index] is slot:
                self._look_at(slot)

    def _end_starts_that_hang(self) -> None:
        """Kill workers that start much more slowly than others, and a fork server that hangs."""
        typical = statistics.median(self._start_s) if self._start_s else 0.0
        timeout_s = max(self.spec.settings.failure.hang_timeout_s, _PATIENCE * typical)
        for slot in filter(_is_there, self._slots):
            if slot.born is None and slot.process.pid is not None:
                slot.born = self._clock.now + slot.delay_s
            if slot.born is None or slot.ready or slot.ended_because or not self._start_s:
                continue
            # after a timeout allow more time, since the start may be slow and not hung
            slack_s = timeout_s * 2 ** len(slot.deaths)
            if self._clock.now - slot.born > slack_s:
                self.kill(slot.index, f"was not ready after {slack_s:.1f} s and was killed")
        self._end_fork_server_that_hangs(timeout_s)

    def _end_fork_server_that_hangs(self, timeout_s: float) -> None:
        """Kill a fork server that does not answer, with all its workers.

        Only the fork server can report how they end, or start others.
        """
        under_way = self._fork_server.under_way
        if under_way != self._under_way[0]:
            self._under_way = under_way, self._clock.now
        # a new fork server imports torch first
        deadline_s = timeout_s if self._fork_server.is_warm else self.spec.settings.cluster.wait_for_workers_s
        if under_way is None or self._clock.now - self._under_way[1] <= deadline_s:
            return
        for slot in filter(_is_there, self._slots):
            slot.is_collateral = True
            self.kill(slot.index, "was killed with its fork server, which did not answer for "
                                  f"{deadline_s:.1f} s")
        self._fork_server.end()
        self._under_way = None, 0.0

    def _look_at(self, slot: _Slot) -> None:
        try:
            # messages sent before the death come first
            with contextlib.suppress(Disconnected):
                slot.messages.flush()
            for message in slot.messages.arrived():
                self._take(slot, message)
        except Disconnected:
            self._died(slot)

    def _take(self, slot: _Slot, message: object) -> None:
        if isinstance(message, Ready):
            slot.refused = check_fingerprint(slot.index, message.fingerprint, self.agreement,
                                             self._restarts, is_starting=self._is_starting)
            if slot.refused:
                slot.ended_because = f"was rejected ({slot.refused})"
                slot.process.kill()
                return
            slot.ready, slot.fingerprint = True, message.fingerprint
            slot.deaths.clear()
            self._start_s.append(self._clock.now - (slot.born or self._clock.now))
        elif isinstance(message, (MeanShard, GroupFailure, np.ndarray)):
            self._answers[slot.index] = message
        elif isinstance(message, (JobResult, JobFailure)):
            if slot.is_quarantined:
                # its death follows
                return
            if slot.job is None or message.job.identity != slot.job.identity:
                self.num_discarded += 1
                return
            # the job as it was submitted: references are counted by identity
            message = replace(message, job=slot.job)
            self._outcomes.append(message if isinstance(message, JobFailure)
                                  else remote(message, self._fetch))
            self._snapshots.ended(message)
            if isinstance(message, JobFailure):
                self._release_places(slot)
            else:
                # the job ended early without a request of the pool: its worker received a signal
                slot.leaving = bool(message.remainder) and not slot.told_to_stop
                # its partial result is here, and its machine is needed elsewhere
                if slot.leaving:
                    slot.ended_because = "was asked to end by a signal"
                    slot.process.kill()
            slot.job, slot.places = None, ()
        elif isinstance(message, NgsgdError):
            raise message
        elif isinstance(message, Exception):
            # the process ends now; another attempt may succeed, for example with more free memory
            slot.ended_because = f"could not start ({type(message).__name__}: {message})"

    def _died(self, slot: _Slot) -> None:
        # its connection is closed, so the process is useless even if it lives
        slot.process.kill()
        is_known = slot.process.exit_code(_STATUS_S) is not None
        slot.messages.close()
        reason = f"process {slot.process.pid} {slot.ended_because or _how_it_ended(slot.process)}"
        job, deaths = slot.job, slot.deaths
        self._release_places(slot, is_gone=is_known or slot.process.is_orphan)
        if job is not None:
            # no retry continues from a snapshot of a worker that computes wrong results
            is_usable = (is_known or slot.process.is_orphan) and not slot.is_quarantined
            self._snapshots.failed(job, slot.index, is_gone=is_usable)
        if not slot.ready and not slot.is_collateral:
            deaths = [*deaths, reason]
            # a worker that cannot start does not end a run that has other workers
            if len(deaths) >= self.spec.settings.failure.max_attempts and (self._is_starting or not self.num_workers_alive()):
                if slot.refused:
                    raise none_agrees(slot.refused)
                raise ClusterError(f"worker {slot.index} died {len(deaths)} times while starting "
                                   f"({reason}); fix the cause and resume{self._tail(slot.index)}.")
        self._slots[slot.index] = self._successor(slot, deaths, reason)
        # in a collective exchange it may hold a result, whose loss the coordinator reports
        if job is None and not self._exchange and not slot.refused and not self._slots[slot.index].retired:
            when = "while it was idle" if slot.ready else "while it started"
            self._restarts.report("worker_replaced", slot.index,
                                  f"worker {slot.index} ended {when} ({reason}) and is replaced; no job is lost")
        if job is not None:
            from_outside = slot.killed is not None or slot.process.is_orphan
            self._outcomes.append(JobFailure(job, slot.index, reason, True,
                                             last_words=self._tail(slot.index),
                                             from_outside=from_outside))

    def _successor(self, slot: _Slot, deaths: Sequence[str], reason: str) -> _Slot:
        """Replace a dead worker; return an empty slot if it was replaced too often."""
        if not slot.is_quarantined and self._restarts.allow(slot.index, reason):
            fresh = self._new_slot(slot.index, deaths)
        elif any(_is_there(other) for other in self._slots if other is not slot):
            fresh = _Slot(slot.index, slot.process, slot.messages, retired=True)
        else:
            raise self._restarts.none_left(reason)
        fresh.predecessor = reason
        return fresh

    def _ask(self, questions: Mapping[int, object], timeout_s: float,
             when_lost: Callable[[], None] = _nothing
             ) -> dict[int, object]:
        """Return the answers of idle workers; workers silent for too long are killed and
        replaced.
        """
        self._answers = {}
        asked = {worker: self._slots[worker] for worker in questions}

        def silent() -> list[int]:
            return [worker for worker, slot in asked.items() if worker not in self._answers
                    and self._slots[worker] is slot]
        for worker, question in questions.items():
            # the next poll detects the death
            with contextlib.suppress(Disconnected):
                asked[worker].messages.post(question)
        self._clock.catch_up()
        deadline = self._clock.now + timeout_s
        while silent() and self._clock.now < deadline:
            self._poll(min(_POLL_S, max(0.0, deadline - self._clock.now)))
            if any(self._slots[worker] is not slot for worker, slot in asked.items()):
                when_lost()
        for worker in silent():
            self.kill(worker, f"gave no answer for {timeout_s:g} s and was killed")
        while silent():
            self._poll(_POLL_S)
        return self._answers

    def _fetch(self, kept: RemoteResultRef) -> Vector:
        """Return a complete result that is stored in its worker."""
        reason = self._why_lost(kept)
        timeout_s = self.spec.settings.cluster.exchange_timeout_s
        vector = None if reason else self._ask({kept.worker: FetchRequest(kept.identity)}, timeout_s).get(kept.worker)
        if not isinstance(vector, np.ndarray):
            raise ClusterError(reason or self._why_lost(kept))
        return vector

    def _why_lost(self, kept: RemoteResultRef) -> str:
        """How the process that stores a result ended; empty while it lives."""
        slot = self._slots[kept.worker]
        lives = not slot.retired and process_name(slot.process.pid or 0) == kept.process
        return "" if lives else f"{slot.predecessor or 'its process is gone'}; its result is lost"

    def _release_places(self, slot: _Slot, *, is_gone: bool = True) -> None:
        for ref in slot.places:
            if is_gone:
                self._vectors.release(ref)
            else:
                # it may still write there
                self._vectors.discard(ref)
        slot.places = ()

    def _tail(self, index: int) -> str:
        """Last lines of the log of a worker."""
        if not self.log_directory or not (path := self.log_directory / f"worker-{index}.log").exists():
            return ""
        lines = files.last_lines(path, _LAST_LINES)
        return "; end of its log:\n" + "\n".join(lines) if lines else ""


def _is_there(slot: _Slot) -> bool:
    return not slot.retired


def _how_it_ended(process: ForkedProcess) -> str:
    exitcode = process.exit_code(0.0)
    if process.failure:
        return process.failure
    if process.is_orphan:
        return "ended with its fork server"
    if exitcode is None:
        return "ended, and the fork server reported no exit code"
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended with code {exitcode}"
