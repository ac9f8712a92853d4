"""A WorkerPool of processes on this machine, with parameters in shared memory.

Deaths are detected immediately. Processes come from a fork server that has already imported torch,
so a replacement is ready in tens of milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ngsgd import files
from ngsgd.cluster.exchange.collective import FetchRequest, GroupFailure, StepRequest, StepShard
from ngsgd.cluster.exchange.collective_client import Ending, Exchange
from ngsgd.cluster.exchange.shared_memory import SharedSnapshotMemory
from ngsgd.cluster.fingerprint import Agreement
from ngsgd.cluster.fork_server import ForkedProcess, fork_server, modules_of
from ngsgd.cluster.groups import make_worker
from ngsgd.cluster.messages import Disconnected, Messages
from ngsgd.cluster.process import Activity, activity_of
from ngsgd.cluster.slot_pool import Slot, SlotPool
from ngsgd.cluster.worker_process import EXIT_TERMINATED, STOP, JobAssignment, MakeWorker, Ready, WorkerSetup, serve
from ngsgd.errors import FailureKind, NgsgdError, failure_kind
from ngsgd.training.job import Job, JobFailure, JobResult
from ngsgd.training.task import TaskSpec

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_PATIENCE = 5.0  # a start hangs after this many median start times
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 60.0  # delay before another attempt to start
_LAST_LINES = 50  # lines of the log of a dead worker that a failure quotes
_STATUS_S = 1.0  # time for the fork server to report how a process ended
_CLOSE_S = 2.0  # time for all processes to end with the pool
_REQUESTS_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(kw_only=True)
class _Slot(Slot):
    process: ForkedProcess
    messages: Messages
    delay_s: float  # seconds that the process waits before it does anything
    # seconds on the pool's clock; None until the fork server has forked it
    born: float | None = None


class ProcessPool(SlotPool[_Slot]):
    """Long-lived worker processes, one job at a time each."""

    def __init__(self, spec: TaskSpec, num_workers: int, num_threads: int, size: int, *,
                 log_directory: Path | None = None,
                 make_worker: MakeWorker = make_worker, agreement: Agreement | None = None,
                 report: Callable[[str], object] = lambda _line: None) -> None:
        super().__init__(spec, num_workers, num_threads, size, agreement, report)
        self.log_directory = log_directory
        self.make_worker = make_worker
        self._start_s: deque[float] = deque(maxlen=64)
        self._fork_server = fork_server()
        # (pending start, time since which it is pending)
        self._under_way: tuple[int | None, float] = (None, 0.0)
        if spec.settings.cluster.exchange == "collective":
            self._exchange = Exchange("127.0.0.1", codec=spec.settings.cluster.codec)

    def start(self) -> None:
        if self.log_directory:
            self.log_directory.mkdir(parents=True, exist_ok=True)
        self._start_workers(self.num_workers)

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
        super().close()

    def _new_slot(self, index: int, deaths: Sequence[str] = ()) -> _Slot:
        """Start a process; the delay grows with the number of failed starts."""
        delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (len(deaths) - 1)) if deaths else 0.0
        ours, theirs = socket.socketpair()
        log = str(self.log_directory / f"worker-{index}.log") if self.log_directory else ""
        messages = Messages(ours)
        messages.post(WorkerSetup(self.spec, index, self.num_threads, self._heartbeats, log,
                                  self.make_worker, delay_s, self.agreement.has_kernels))
        process = self._fork_server.launch(serve, (theirs,), theirs, f"ngsgd worker {index}",
                                           modules_of(self.spec, self.make_worker))
        return _Slot(index=index, process=process, messages=messages, delay_s=delay_s, deaths=list(deaths))

    def _post(self, slot: _Slot, job: Job, snapshots: SharedSnapshotMemory | None, *, keep: bool) -> None:
        self._send(slot, JobAssignment(job, slot.places, keep, snapshots))

    def _request(self, slot: _Slot, question: StepRequest | FetchRequest) -> None:
        self._send(slot, question)

    def _ask_to_stop(self, slot: _Slot) -> None:
        self._send(slot, STOP)

    def _send(self, slot: _Slot, message: object) -> None:
        # a worker died a moment ago; the next poll detects that
        with contextlib.suppress(Disconnected):
            slot.messages.post(message)

    def _kill(self, slot: _Slot) -> None:
        slot.process.kill()

    @property
    def advice(self) -> str:
        return "fix the cause and resume"

    def _process_id(self, slot: _Slot) -> int:
        return slot.process.pid or 0

    def _host(self, slot: _Slot) -> str:
        return os.uname().nodename

    def _activity(self, slot: _Slot) -> Activity | None:
        return None if slot.process.pid is None else activity_of(slot.process.pid)

    def _process_events(self, timeout_s: float) -> None:
        self._end_starts_that_hang()
        with selectors.PollSelector() as selector:
            for slot in self._slots:
                if not slot.retired:
                    selector.register(slot.messages, _READ | _WRITE if slot.messages.has_unsent else _READ, slot)
            happened = [key.data for key, _ in selector.select(timeout_s)]
        for slot in happened:
            if self._slots[slot.index] is not slot:
                # the death of another worker ended this one
                continue
            try:
                # messages sent before the death come first
                with contextlib.suppress(Disconnected):
                    slot.messages.flush()
                for message in slot.messages.arrived():
                    self._receive(slot, message)
            except Disconnected:
                self._died(slot)

    def _end_starts_that_hang(self) -> None:
        """Kill workers that start much more slowly than others, and a fork server that hangs."""
        typical = statistics.median(self._start_s) if self._start_s else 0.0
        timeout_s = max(self.spec.settings.failure.hang_timeout_s, _PATIENCE * typical)
        for slot in [slot for slot in self._slots if not slot.retired]:
            if slot.born is None and slot.process.pid is not None:
                slot.born = self._clock.now + slot.delay_s
            if slot.born is None or slot.ready or slot.ending or not self._start_s:
                continue
            # after a timeout allow more time, since the start may be slow and not hung
            slack_s = timeout_s * 2 ** len(slot.deaths)
            if self._clock.now - slot.born > slack_s:
                self.kill(slot.index, f"was not ready after {slack_s:.1f} s and was killed")
        # only the fork server can report how workers end, or start others
        under_way = self._fork_server.under_way
        if under_way != self._under_way[0]:
            self._under_way = under_way, self._clock.now
        # a new fork server imports torch first
        deadline_s = timeout_s if self._fork_server.is_warm else self.spec.settings.cluster.wait_for_workers_s
        if under_way is None or self._clock.now - self._under_way[1] <= deadline_s:
            return
        for slot in self._slots:
            if not slot.retired:
                slot.is_collateral = True
                self._kill_for(slot, Ending("was killed with its fork server, which did not answer for "
                                            f"{deadline_s:.1f} s", FailureKind.FORK_SERVER))
        self._fork_server.end()
        self._under_way = None, 0.0

    def _receive(self, slot: _Slot, message: object) -> None:
        if isinstance(message, Ready):
            self._admit(slot, message.fingerprint)
            if slot.ready:
                self._start_s.append(self._clock.now - (slot.born or self._clock.now))
        elif isinstance(message, (StepShard, GroupFailure, np.ndarray)):
            self._answers[slot.index] = message
        elif isinstance(message, (JobResult, JobFailure)):
            self._take(slot, message)
        elif isinstance(message, NgsgdError):
            raise message
        elif isinstance(message, Exception):
            # the process ends now; another attempt may succeed, for example with more free memory
            name = type(message).__name__
            kind = failure_kind(name, str(message))
            slot.ending = Ending(f"could not start ({name}: {message})",
                                 kind if kind is FailureKind.MEMORY else FailureKind.START_EXCEPTION)

    def _end(self, slot: _Slot) -> tuple[Ending, bool]:
        # its connection is closed, so the process is useless even if it lives
        slot.process.kill()
        is_gone = slot.process.exit_code(_STATUS_S) is not None or slot.process.is_orphan
        slot.messages.close()
        found = slot.ending or _how_it_ended(slot.process)
        return Ending(f"process {slot.process.pid} {found.reason}", found.kind), is_gone

    def _last_words(self, slot: _Slot) -> str:
        if not self.log_directory or not (path := self.log_directory / f"worker-{slot.index}.log").exists():
            return ""
        lines = files.last_lines(path, _LAST_LINES)
        return "; end of its log:\n" + "\n".join(lines) if lines else ""


def _how_it_ended(process: ForkedProcess) -> Ending:
    exitcode = process.exit_code(0.0)
    if process.failure:
        return Ending(process.failure, FailureKind.START)
    if process.is_orphan:
        return Ending("ended with its fork server", FailureKind.FORK_SERVER)
    if exitcode is None:
        return Ending("ended, and the fork server reported no exit code", FailureKind.FORK_SERVER)
    if exitcode >= 0:
        kind = FailureKind.ASKED_TO_END if exitcode == EXIT_TERMINATED else FailureKind.EXITED
        return Ending(f"ended with code {exitcode}", kind)
    number = signal.Signals(-exitcode)
    kind = FailureKind.ASKED_TO_END if number in _REQUESTS_TO_END else FailureKind.CRASHED
    return Ending(f"killed by {number.name}", FailureKind.KILLED if number == signal.SIGKILL else kind)
