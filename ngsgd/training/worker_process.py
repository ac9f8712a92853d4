"""A worker in a process of its own: takes jobs from a socket, leaves parameters in shared memory."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType

import numpy as np
import torch

from ngsgd.training.flat import Vector
from ngsgd.training.job import Held, Job, JobFailure, JobResult, WorkerSpec
from ngsgd.training.messages import Disconnected, Messages
from ngsgd.training.shared_memory import SharedRef
from ngsgd.training.worker import Worker

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MakeWorker = Callable[[WorkerSpec, int], Worker]


@dataclass(frozen=True)
class Setting:
    """What a worker process is told at its start."""

    spec: WorkerSpec
    index: int
    num_threads: int
    beats: SharedRef           # a counter per worker, 8 bytes each
    log: str                   # file that takes its output; empty: where the coordinator writes
    make_worker: MakeWorker = Worker


@dataclass(frozen=True)
class Ready:
    """The first message: jobs may come."""

    process_id: int


@dataclass(frozen=True)
class Assignment:
    """A job, and the memory for what it returns."""

    job: Job
    places: tuple[SharedRef, ...]


STOP = "stop"  # end the job after the minibatch at hand


def serve(connection: socket.socket, setting: Setting) -> None:
    """Runs jobs until the coordinator hangs up."""
    # whatever happens to the coordinator, no worker is left behind: its parent, the fork server, ends with it
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _redirect(setting.log)
    torch.set_num_threads(setting.num_threads)
    process = WorkerProcess(Messages(connection), setting)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the coordinator decides
    signal.signal(signal.SIGTERM, process.terminate)
    try:
        process.run()
    except Disconnected:
        sys.exit(0)


class WorkerProcess:
    """The loop around a `Worker`."""

    def __init__(self, messages: Messages, setting: Setting) -> None:
        self.messages = messages
        self.setting = setting
        self._beats = setting.beats.map().view(np.uint64)
        self._should_end = False    # SIGTERM: the machine is wanted back
        self._is_idle = False
        self._should_stop = False   # the coordinator wants what there is

    def terminate(self, signum: int, frame: FrameType | None) -> None:
        self._should_end = True
        if self._is_idle:  # there is nothing to finish, and waiting for a message would go on behind this handler
            sys.exit(0)

    def run(self) -> None:
        try:
            worker = self.setting.make_worker(self.setting.spec, self.setting.index)
        except Exception as error:
            self.messages.send(error)
            return
        self.messages.send(Ready(os.getpid()))
        while self._may_wait():
            message = self.messages.receive()
            self._is_idle = False
            if isinstance(message, Assignment):
                self._should_stop = False
                self.messages.send(self._outcome(worker, message))

    def _may_wait(self) -> bool:
        """False when the process was told to end; from here on `terminate` ends it on the spot."""
        self._is_idle = True
        return not self._should_end

    def _outcome(self, worker: Worker, assignment: Assignment) -> JobResult | JobFailure:
        refs: dict[int, SharedRef] = {}
        places = list(assignment.places)

        def place(size: int) -> Vector:
            ref = replace(places.pop(0), size=size)
            vector = ref.read()
            refs[id(vector)] = ref
            return vector

        def shared(held: object) -> SharedRef:
            assert isinstance(held, Held)
            return refs[id(held.vector)]
        try:
            result = worker.run(assignment.job, place, self._beat)
            return replace(result, sent=shared(result.sent), own=shared(result.own) if result.own else None)
        except Exception as error:
            return JobFailure(assignment.job, self.setting.index, f"{type(error).__name__}: {error}", False, error)

    def _beat(self) -> bool:
        """Shows that a minibatch is done; true when the job should end here."""
        self._beats[self.setting.index] += np.uint64(1)
        self._should_stop |= STOP in self.messages.arrived()
        return self._should_stop or self._should_end


def _redirect(log: str) -> None:
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)
