"""Worker processes of the probe: they run jobs, shortened if necessary, and return timings."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from ngsgd.cluster.process import configure_process
from ngsgd.errors import ClusterError, NgsgdError
from ngsgd.training.job import Job
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Worker

# minibatches at the start of a job with a Fisher update each
_WARM = 11
# seconds for a killed process to end
_END_S = 5.0
# minibatches between two readings of the clock: a multiple of the default update period, 4
_MARK = 8


@dataclass(frozen=True)
class TimedJob:
    job: Job
    num_threads: int
    limit_s: float


@dataclass(frozen=True)
class JobTiming:
    """Timing of a job."""

    seconds: float           # total
    # per minibatch after the first eleven
    step_s: float
    # time of a job besides its steps
    fixed_s: float
    num_minibatches: int
    parameters: Vector


class Process:
    """Handle of a worker process."""

    def __init__(self, process: Any, connection: Connection, timeout_s: float) -> None:
        self.process, self.connection, self.timeout_s = process, connection, timeout_s

    def send(self, message: object) -> None:
        # it is gone, which `receive` reports
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """Return the answer of the process; raise its exception."""
        try:
            if not self.connection.poll(self.timeout_s):
                raise ClusterError("a worker of the probe did not answer within "
                                   f"cluster.wait_for_workers_s = {self.timeout_s:g}; raise the "
                                   "timeout.")
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(1.0)
            raise ClusterError(f"a worker of the probe ended with code {self.process.exitcode}; "
                               "check the free memory, or use a smaller model.") from error
        if isinstance(answer, NgsgdError):
            raise answer
        if isinstance(answer, Exception):
            raise ClusterError(f"a worker of the probe failed ({type(answer).__name__}: {answer}); "
                               "check that `ngsgd train cluster=in_process` runs.") from answer
        return answer


@contextlib.contextmanager
def workers(spec: TaskSpec, count: int, num_gpus: int) -> Iterator[list[Process]]:
    """Start `count` processes that are ready for jobs; they end with the context."""
    # forked from a process that has only imported torch: one import for all, and no locks of our
    # threads
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    started = []
    try:
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, spec, index, num_gpus), daemon=True)
            process.start()
            theirs.close()
            started.append(Process(process, ours, spec.settings.cluster.wait_for_workers_s))
        for worker in started:
            worker.receive()
        yield started
    finally:
        for worker in started:
            worker.process.kill()
        for worker in started:
            worker.process.join(_END_S)
            worker.connection.close()


def serve(connection: Connection, spec: TaskSpec, index: int, num_gpus: int) -> None:
    """Run tasks and echo vectors in the worker process until the connection is closed."""
    try:
        if num_gpus:
            torch.cuda.set_device(index % num_gpus)
        worker = Worker(spec, index)
        connection.send("ready")
        while True:
            message = connection.recv()
            connection.send(timed(worker, message) if isinstance(message, TimedJob) else message)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        connection.send(error)


def timed(worker: Worker, task: TimedJob) -> JobTiming:
    configure_process(task.num_threads)
    watch = Watch(time.perf_counter() + task.limit_s, uses_gpu=worker.device.type == "cuda")
    began = time.perf_counter()
    result = worker.run(task.job, should_stop=watch)
    seconds = time.perf_counter() - began
    step_s = watch.step_s(seconds, result.num_minibatches)
    fixed_s = max(0.0, seconds - step_s * result.num_minibatches)
    return JobTiming(seconds, step_s, fixed_s, result.num_minibatches, np.array(result.sent.read()))


class Watch:
    """A stop signal at a given time that also records when minibatches were done."""

    def __init__(self, deadline: float, *, uses_gpu: bool) -> None:
        self.deadline, self.uses_gpu = deadline, uses_gpu
        self.num_asked = 0
        self.marks: list[tuple[int, float]] = []  # (minibatches done, time)

    def __call__(self) -> bool:
        self.num_asked += 1
        if self.num_asked < _WARM or (self.num_asked - _WARM) % _MARK:
            return False
        if self.uses_gpu:
            # operations are queued ahead of the GPU
            torch.cuda.synchronize()
        self.marks.append((self.num_asked, time.perf_counter()))
        return self.marks[-1][1] > self.deadline and len(self.marks) > 1

    def step_s(self, seconds: float, num_minibatches: int) -> float:
        """Seconds per minibatch after warm-up of the Fisher estimates; for a short job, its
        mean.
        """
        if len(self.marks) < 2:
            return seconds / num_minibatches
        (first, start), (last, end) = self.marks[0], self.marks[-1]
        return (end - start) / (last - first)
