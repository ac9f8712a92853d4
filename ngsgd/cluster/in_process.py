"""A worker pool inside the process of the coordinator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.groups import make_worker
from ngsgd.cluster.process import configure_process
from ngsgd.cluster.restarts import none_agrees
from ngsgd.errors import DamagedArchiveError
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.training.job import Job, JobFailure, JobResult, LocalRef, Outcome, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import never, np_empty
from ngsgd.training.worker_pool import Retired


class InProcessPool:
    """Logical workers in this process, one job at a time; breakpoints work."""

    def __init__(self, spec: TaskSpec, num_workers: int, num_threads: int,
                 should_stop: Callable[[], bool] = never, agreement: Agreement | None = None) -> None:
        self.spec, self.num_workers, self.num_threads = spec, num_workers, num_threads
        self.should_stop, self.agreement = should_stop, agreement
        self._queue: deque[Job] = deque()

    def start(self) -> None:
        configure_process(self.num_threads)
        self._worker = make_worker(self.spec, 0)
        if self.agreement is not None and (differences := self.agreement.refusal(
                Fingerprint.of_this_process(self.num_threads, self._worker.device,
                                            self.spec.settings.cluster.precision, self._worker.ranks.summed_by))):
            raise none_agrees(differences)

    @property
    def device(self) -> torch.device:
        """The device of the worker, after `start`."""
        return self._worker.device

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        write(vector := np_empty(self._worker.layout.size))
        return LocalRef(vector)

    def release(self, ref: VectorRef) -> None:
        pass

    def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo) -> bool:
        return False

    def num_idle(self) -> int:
        return self.num_workers - len(self._queue)

    def num_workers_alive(self) -> int:
        return self.num_workers

    def has_busy_start(self) -> bool:
        return False

    def retired(self) -> list[Retired]:
        return []

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def wait(self, timeout_s: float) -> Outcome | None:
        if not self._queue:
            return None
        job = self._queue.popleft()
        # jobs leave no state in a worker, so one object serves all worker indices
        self._worker.index = job.job % self.num_workers
        try:
            result: JobResult = self._worker.run(job, np_empty, self.should_stop)
        except DamagedArchiveError as error:
            # the coordinator decides whether to continue without the archive
            return JobFailure(job, self._worker.index, str(error), False, error)
        return result

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        return {}

    def kill(self, worker: int, reason: str) -> None:
        raise AssertionError("a job in this process cannot be killed")

    def stop_jobs(self, outer_iter: int) -> None:
        pass

    def abandon(self) -> None:
        self._queue.clear()

    def close(self) -> None:
        self.abandon()
