"""Workers whose minibatches mostly sleep, so that each stands for a separate machine.

This module imports little, because each worker process does so after its start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.training.job import Job, JobResult
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty


@dataclass(frozen=True)
class Steady:
    """Makes workers whose minibatches last `minibatch_s`, and that raise an error when a marker
    file exists.
    """

    folder: str
    minibatch_s: float

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        return SteadyWorker(spec, index, self)


class SteadyWorker(Worker):
    def __init__(self, spec: TaskSpec, index: int, how: Steady) -> None:
        super().__init__(spec, index)
        self.how = how

    def _train(self, *arguments: Any) -> None:
        began = time.perf_counter()
        super()._train(*arguments)
        time.sleep(max(0.0, self.how.minibatch_s - (time.perf_counter() - began)))
        wish = Path(self.how.folder) / f"raise-{self.index}"
        if wish.exists():
            wish.unlink()
            raise RuntimeError("an error made by the soak test")


@dataclass(frozen=True)
class Marking:
    """Makes workers of the soak test that leave a file when they begin their first job, and when
    they begin to repeat one.
    """

    steady: Steady

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        return _MarkingWorker(spec, index, self.steady)


class _MarkingWorker(SteadyWorker):
    is_new = True

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        if job.attempt > 1:
            mark_of(Path(self.how.folder), *job.identity).touch()
        if self.is_new:
            (Path(self.how.folder) / f"first-{os.getpid()}").touch()
            self.is_new = False
        return super().run(job, place, should_stop)


def mark_of(folder: Path, outer_iter: int, job: int, attempt: int) -> Path:
    """The file that a worker creates when it begins to repeat a job."""
    return folder / f"retry-{outer_iter}-{job}-{attempt}"
