"""Workers whose minibatches mostly sleep, so that each stands for a separate machine.

This module imports little, because each worker process does so after its start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngsgd.training.job import Job, JobResult
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty


class SteadyWorker(Worker):
    """Its minibatches last `minibatch_s`; it raises an error when a marker file exists."""

    def __init__(self, spec: TaskSpec, index: int, folder: Path, minibatch_s: float) -> None:
        super().__init__(spec, index)
        self.folder, self.minibatch_s = folder, minibatch_s

    def _train(self, *arguments: Any) -> None:
        began = time.perf_counter()
        super()._train(*arguments)
        time.sleep(max(0.0, self.minibatch_s - (time.perf_counter() - began)))
        wish = self.folder / f"raise-{self.index}"
        if wish.exists():
            wish.unlink()
            raise RuntimeError("an error made by the soak test")


class MarkingWorker(SteadyWorker):
    """Leaves a file when it begins its first job, and when it begins to repeat one."""

    is_new = True

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        if job.attempt > 1:
            mark_of(self.folder, *job.identity).touch()
        if self.is_new:
            (self.folder / f"first-{os.getpid()}").touch()
            self.is_new = False
        return super().run(job, place, should_stop)


def mark_of(folder: Path, outer_iter: int, job: int, attempt: int) -> Path:
    """The file that a worker creates when it begins to repeat a job."""
    return folder / f"retry-{outer_iter}-{job}-{attempt}"
