"""Where jobs run: the protocol that the coordinator drives, and the pool inside this very process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from ngsgd.training.flat import Vector
from ngsgd.training.job import Job, JobFailure, JobResult, WorkerSpec
from ngsgd.training.worker import Worker, never

Outcome = JobResult | JobFailure


class WorkerPool(Protocol):
    """N long-lived workers.  A pool reports how a job ended; what to do about it is the coordinator's business."""

    def start(self) -> None:
        """Waits until the workers are ready; ClusterError when they cannot be had."""

    def broadcast(self, parameters: Vector) -> None:
        """The model that jobs submitted from now on start from."""

    def num_idle(self) -> int:
        """Workers that could take a job now."""

    def submit(self, job: Job) -> None:
        """Gives a job to an idle worker."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """How a running job ended; None when none has within the time (the in-process pool ignores it)."""

    def abandon(self) -> None:
        """Gives up the jobs that are running."""

    def close(self) -> None:
        """Ends the workers."""


class InProcessPool:
    """Logical workers in this process, one job at a time: breakpoints work, and the numbers are those of any pool."""

    def __init__(self, spec: WorkerSpec, num_workers: int, num_threads: int,
                 should_stop: Callable[[], bool] = never) -> None:
        self.spec = spec
        self.num_workers = num_workers
        self.num_threads = num_threads
        self.should_stop = should_stop
        self._queue: deque[Job] = deque()

    def start(self) -> None:
        torch.set_num_threads(self.num_threads)  # sums depend on it; the other pools use the same number
        self._worker = Worker(self.spec, 0)

    def broadcast(self, parameters: Vector) -> None:
        self._parameters = parameters

    def num_idle(self) -> int:
        return self.num_workers - len(self._queue)

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def wait(self, timeout_s: float) -> Outcome | None:
        job = self._queue.popleft()
        # a job leaves nothing behind in its worker, so one object can stand for all
        self._worker.index = job.job % self.num_workers
        return self._worker.run(job, self._parameters, self.should_stop)

    def abandon(self) -> None:
        self._queue.clear()

    def close(self) -> None:
        self._queue.clear()
