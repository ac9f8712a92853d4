"""Where and how a process breaks: real faults, once each, which leave a mark."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd.cluster.exchange.shared_memory import SharedRef
from ngsgd.cluster.messages import Messages, framed
from ngsgd.training.job import Job, JobFailure, JobResult, LocalRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.validation.checksums import digest, not_finite
from ngsgd.training.worker import Place, Worker, never, np_empty
from tests.tiers import HANGS_S

SLOW_S = 0.15   # at a point where no minibatch could be drawn out
_PAUSE_S = 0.03  # long enough for the coordinator to take in a message


@dataclass(frozen=True)
class Fault:
    """What breaks `num_times` in a row; each time leaves a file next to `mark`."""

    when: str
    how: str
    mark: str
    at: tuple[int, int] = (2, 1)   # outer iteration and job
    num_times: int = 1
    # the outer iteration's first job ends only after the fault has struck
    others_wait: bool = False

    def strike(self) -> bool:
        """Break this process as planned; return, if at all, whether it was this fault's turn."""
        for number in range(self.num_times):
            try:
                descriptor = os.open(f"{self.mark}.{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            os.write(descriptor, f"{os.getpid()} {time.time()}".encode())
            os.close(descriptor)
            _break(self.how)
            return True
        return False

    def wait(self) -> None:
        """Return when it has happened, or after so long that it never will."""
        deadline = time.monotonic() + HANGS_S
        while not self.strikes() and time.monotonic() < deadline:
            time.sleep(0.01)

    def strikes(self) -> list[tuple[int, float]]:
        """(process, seconds since the epoch) of each time that it has happened."""
        found = []
        for path in sorted(Path(self.mark).parent.glob(f"{Path(self.mark).name}.*")):
            with contextlib.suppress(ValueError):  # opened, and not written yet
                process_id, at_s = path.read_text().split()
                found.append((int(process_id), float(at_s)))
        return found


def _break(how: str) -> None:
    """Break this process; "nothing" is done where the fault struck."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "exception":
        raise RuntimeError("an error made by the test")
    elif how == "MemoryError":
        raise MemoryError("no memory, says the test")
    elif how == "exit 0":
        sys.exit(0)
    elif how == "slow":
        time.sleep(SLOW_S)
    # keeps the interpreter's lock: no other thread and no signal handler gets a turn
    while how == "deadlock":
        ctypes.PyDLL(None).pause()


@dataclass(frozen=True)
class Breaks:
    """Makes workers of which one breaks; sent to the worker processes."""

    fault: Fault

    def __call__(self, spec: TaskSpec, index: int) -> BreakingWorker:
        if self.fault.when == "start" and index == self.fault.at[1]:
            self.fault.strike()
        worker = BreakingWorker(spec, index, self.fault)
        _break_messages(worker)
        return worker


class BreakingWorker(Worker):
    """Asks the fault at each of its points."""

    def __init__(self, spec: TaskSpec, index: int, fault: Fault) -> None:
        super().__init__(spec, index)
        self.fault = fault
        # jobs of later outer iterations start only after this fault has struck
        self.next_fault: Fault | None = None
        self.is_chosen = False
        self._is_slow = False

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        self.is_chosen = (job.outer_iter, job.job) == self.fault.at
        self._number, self._is_slow = 0, False
        self._last = sum(1 for _ in self._batches(job)) - 1
        return super().run(job, place, should_stop)

    def _load(self, job: Job) -> Vector:
        if self.fault.when == "idle" and (job.outer_iter, job.job) == (self.fault.at[0], 0):
            time.sleep(8 * _PAUSE_S)  # so that the other worker is idle meanwhile
        if self.fault.others_wait and (job.outer_iter, job.job) == (self.fault.at[0], 0):
            self.fault.wait()
        if self.next_fault is not None and job.outer_iter > self.fault.at[0]:
            self.next_fault.wait()
        start = super()._load(job)
        self._break("model received")
        return start

    def _train(self, *arguments: Any) -> None:
        began = time.perf_counter()
        super()._train(*arguments)
        if self._number == 0:
            self._break("first minibatch")
        if self._number == self._last // 2:
            self._break("mid shard")
        if self._number == self._last:
            self._break("last minibatch")
        self._number += 1
        if self._is_slow:
            time.sleep(2 * (time.perf_counter() - began))

    def _result(self, *arguments: Any) -> JobResult:
        result = super()._result(*arguments)
        self._break("result built")
        return result

    def _break(self, when: str) -> None:
        if self.is_chosen and when == self.fault.when:
            self._is_slow |= self.fault.strike() and self.fault.how == "slow"


def _break_messages(worker: BreakingWorker) -> None:
    """Breaks what this process sends and how it waits for more."""
    fault, send, receive = worker.fault, Messages.send, Messages.receive

    def breaking_send(messages: Messages, message: object) -> None:
        if not isinstance(message, JobResult) or not worker.is_chosen:
            send(messages, message)
        elif fault.when == "mid upload":
            content = framed(message)
            messages.connection.sendall(content[:len(content) // 2])
            fault.strike()
            messages.connection.sendall(content[len(content) // 2:])
        else:
            send(messages, message)
            if fault.when == "after ack":
                time.sleep(_PAUSE_S)
                fault.strike()

    def breaking_receive(messages: Messages) -> object:
        if fault.when == "idle" and worker.is_chosen:
            time.sleep(_PAUSE_S)
            fault.strike()
        return receive(messages)
    Messages.send = breaking_send  # type: ignore[method-assign, assignment]
    Messages.receive = breaking_receive  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Spoils:
    """Makes workers one of whose results is wrong; sent to the worker processes."""

    fault: Fault

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        worker = SpoilingWorker(spec, index, self.fault)
        _spoil_messages(worker)
        return worker


class SpoilingWorker(Worker):
    """Numbers that are none, which the worker itself must notice."""

    def __init__(self, spec: TaskSpec, index: int, fault: Fault) -> None:
        super().__init__(spec, index)
        self.fault = fault

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        result = super().run(job, place, should_stop)
        number = {"NaN": np.nan, "Inf": np.inf}.get(self.fault.how)
        if number is None or (job.outer_iter, job.job) != self.fault.at or not _marked(self.fault):
            return result
        assert isinstance(result.sent, LocalRef)
        result.sent.vector[5] = number
        pieces = self.layout.fragment(*job.send)
        reason = not_finite(result.sent.vector, self.layout, pieces)
        return replace(result, digest=digest(result.sent.vector), rejection_reason=reason)


def _marked(fault: Fault) -> bool:
    """Whether it is the fault's turn; it is marked as done."""
    return replace(fault, how="nothing").strike()


def _spoil_messages(worker: SpoilingWorker) -> None:
    """Damages results in transit."""
    fault, send = worker.fault, Messages.send

    def spoiling_send(messages: Messages, message: object) -> None:
        is_chosen = isinstance(message, JobResult) and (message.job.outer_iter, message.job.job) == fault.at
        if not is_chosen or fault.how in ("NaN", "Inf") or not _marked(fault):
            send(messages, message)
            return
        assert isinstance(message, JobResult)
        for one in _spoilt(fault.how, message):
            send(messages, one)
    Messages.send = spoiling_send  # type: ignore[method-assign, assignment]


class _BentRef(SharedRef):
    """A vector that arrives as a matrix."""

    def read(self) -> Vector:
        return super().read().reshape(1, -1)


def _spoilt(how: str, result: JobResult) -> list[object]:
    """The messages that arrive instead of a result."""
    sent = result.sent
    assert isinstance(sent, SharedRef)
    if how == "truncated":
        return [replace(result, sent=replace(sent, size=7))]
    if how == "wrong shape":
        return [replace(result, sent=_BentRef(sent.path, sent.inode, sent.size))]
    if how == "wrong outer iteration":
        return [replace(result, job=replace(result.job, outer_iter=result.job.outer_iter - 1))]
    if how == "duplicate":
        return [result, result]
    if how == "after abandonment":
        # first the job is reported as failed: its later result belongs to an abandoned attempt
        return [JobFailure(result.job, result.worker, "gave up, says the test", False), result]
    assert how == "bit flip"
    sent.read().view(np.uint32)[3] ^= 1 << 22
    return [result]
