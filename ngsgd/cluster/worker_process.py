"""A worker in a separate process: reads jobs from a socket, writes parameters to shared memory."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from types import FrameType

import numpy as np
import torch

from ngsgd.cluster.exchange.collective import CollectiveWorker, FetchRequest, StepRequest
from ngsgd.cluster.exchange.selection import WorkerDevice
from ngsgd.cluster.exchange.shared_memory import SharedRef, SharedSnapshotMemory
from ngsgd.cluster.fingerprint import Fingerprint
from ngsgd.cluster.messages import Disconnected, Messages
from ngsgd.cluster.newborn import die_with_parent
from ngsgd.cluster.process import configure_process
from ngsgd.training.job import Job, JobFailure, JobResult
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Worker

MakeWorker = Callable[[TaskSpec, int], Worker]


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a worker process."""

    spec: TaskSpec
    index: int
    num_threads: int
    heartbeats: SharedRef  # one counter per worker, 8 bytes each
    log: str  # log file for its output; empty: the output of the coordinator
    make_worker: MakeWorker = Worker
    # seconds to wait before doing anything, after failed starts of predecessors
    delay_s: float = 0.0
    # False: the coordinator has no C++ kernels, so that this worker uses none; None: it decides
    has_kernels: bool | None = None


@dataclass(frozen=True)
class Ready:
    """The first message of a worker: it accepts jobs."""

    process_id: int
    fingerprint: Fingerprint
    device: WorkerDevice
    node_id: str = ""  # of Ray

    @classmethod
    def of(cls, worker: Worker, num_threads: int, *, is_near: bool = True, node_id: str = "") -> Ready:
        fingerprint = Fingerprint.of_this_process(num_threads, worker.device, worker.settings.cluster.precision,
                                                  worker.ranks.summed_by)
        return cls(os.getpid(), fingerprint, WorkerDevice.of(worker.device, is_near=is_near), node_id)


@dataclass(frozen=True)
class JobAssignment:
    """A job, and memory for its vectors, but not for one to average that the worker keeps."""

    job: Job
    places: tuple[SharedRef, ...]
    keep: bool
    snapshots: SharedSnapshotMemory | None = None


# 128 + SIGTERM, the convention of the shell: distinguishes a request from an exit of the job's code
EXIT_TERMINATED = 143
# seconds between two checks for messages during a job; a check takes as long as ten Python calls
_CHECK_S = 0.2
STOP = "stop"  # request to end the job after the current minibatch


def serve(connection: socket.socket) -> None:
    """Receive a setup and then jobs from the connection, until the coordinator closes it."""
    # workers end with their parent, the fork server, which ends with the coordinator. A fork server
    # that another program started has not loaded `newborn`, so this is set again
    descriptor = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if descriptor is not None:
        # the last holder of this pipe keeps the fork server alive, and a hung worker must not
        os.close(descriptor)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    die_with_parent(os.getppid())
    # Ctrl-C, and the end of a terminal, signal all its processes; the coordinator decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    messages = Messages(connection)
    try:
        # not an argument, which would pass through a pipe: a large one would block the parent
        setup = messages.receive()
        assert isinstance(setup, WorkerSetup)
        if setup.log:
            descriptor = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for standard in (1, 2):
                os.dup2(descriptor, standard)
            os.close(descriptor)
        time.sleep(setup.delay_s)
        configure_process(setup.num_threads, setup.has_kernels)
        process = WorkerProcess(messages, setup)
        signal.signal(signal.SIGTERM, process.terminate)
        process.run()
    except Disconnected:
        sys.exit(0)


class WorkerProcess:
    """The loop around a `Worker`."""

    def __init__(self, messages: Messages, setup: WorkerSetup) -> None:
        self.messages = messages
        self.setup = setup
        # NumPy's numbers are slow when their code is not in a cache of the processor
        self._heartbeats = setup.heartbeats.map().view(np.uint64).data
        self._should_end = False  # SIGTERM: the machine is needed elsewhere
        self._is_idle = False
        self._should_stop = False  # the coordinator requests partial results
        # several checks within a short hang timeout
        self._check_s = min(_CHECK_S, setup.spec.settings.failure.hang_timeout_s / 10.0)

    def terminate(self, signum: int, frame: FrameType | None) -> None:
        self._should_end = True
        # nothing to finish, and the blocking receive would resume after this handler
        if self._is_idle:
            sys.exit(EXIT_TERMINATED)

    def run(self) -> None:
        try:
            worker = self.setup.make_worker(self.setup.spec, self.setup.index)
        except Exception as error:
            self.messages.send(error)
            return
        if self._should_end:
            sys.exit(EXIT_TERMINATED)
        worker.snapshots.is_leaving = lambda: self._should_end
        self.messages.send(Ready.of(worker, torch.get_num_threads()))
        self._member = CollectiveWorker(self.setup.index, worker.layout, worker.device)
        while True:
            # from now on `terminate` exits immediately
            self._is_idle = True
            if self._should_end:
                sys.exit(EXIT_TERMINATED)
            message = self.messages.receive()
            self._is_idle = False
            if isinstance(message, JobAssignment):
                self._should_stop, self._checks = False, Checks(self._check_s)
                self.messages.send(self._outcome(worker, message))
            elif isinstance(message, StepRequest):
                self.messages.send(self._member.step(message))
            elif isinstance(message, FetchRequest):
                self.messages.send(self._member.fetch(message.identity))

    def _outcome(self, worker: Worker, assignment: JobAssignment) -> JobResult | JobFailure:
        worker.snapshots.memory = assignment.snapshots
        try:
            return self._member.run(worker, assignment.job, assignment.places, self._heartbeat, keep=assignment.keep)[0]
        except Exception as error:
            return JobFailure.of_error(assignment.job, self.setup.index, error)

    def _heartbeat(self) -> bool:
        """Show progress after a minibatch; return True if the job should end here."""
        checks = self._checks
        checks.num_left -= 1
        if not checks.num_left:
            checks.plan()
            self._heartbeats[self.setup.index] += 1
            self._should_stop |= STOP in self.messages.arrived()
        return self._should_stop or self._should_end


class Checks:
    """The minibatches, about `interval_s` apart, after which a worker shows progress.

    A clock and the memory of the heartbeats would take 4 us after each minibatch, because they are
    in no cache of the processor then.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self.num_left = self._num = 1
        self._last = clock()

    def plan(self) -> None:
        """Set the number of minibatches to the next check, at most twice the last number."""
        last, self._last = self._last, self._clock()
        fitting = int(self._interval_s * self._num / max(self._last - last, 1e-9))
        self.num_left = self._num = max(1, min(2 * self._num, fitting))
