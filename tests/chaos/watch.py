"""A watched pool: what arrived, the recovery from a fault, the longest pause."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.cluster.worker_process import MakeWorker
from ngsgd.training.job import Job, JobResult, Outcome
from ngsgd.training.worker import Worker
from tests.chaos.faults import Fault
from tests.toy import Run


class WatchedPool(ProcessPool):
    """Keeps every vector that came, by its checksum."""

    def __init__(self, run: Run, fault: Fault | None = None, make_worker: MakeWorker = Worker) -> None:
        super().__init__(run.spec, run.config.cluster.num_workers, 1, run.store.layout.size,
                         log_directory=run.folder / "workers", make_worker=make_worker)
        self.fault = fault
        self.kept = run.folder / "kept"
        self.kept.mkdir(exist_ok=True)
        self.longest_pause_s = 0.0     # without any progress
        # job, process, seconds since the epoch
        self.submitted: list[tuple[tuple[int, int, int], int, float]] = []
        self._last: tuple[float, object] = (time.monotonic(), None)

    def submit(self, job: Job) -> None:
        # before: the worker may be struck in this very job before submit returns
        at_s = time.time()
        super().submit(job)
        (process_id,) = [slot.process.pid or 0 for slot in self._slots if slot.job is job]
        self.submitted.append((job.identity, process_id, at_s))

    def wait(self, timeout_s: float) -> Outcome | None:
        outcome = super().wait(timeout_s)
        if isinstance(outcome, JobResult):
            # under the name by which the ledger speaks of it; damaged data may not be a vector
            with contextlib.suppress(ValueError):
                np.save(self.kept / f"{outcome.digest:016x}.npy", outcome.sent.read())
        slots = {-1 - slot.index: (slot.ready, slot.process.pid) for slot in self._slots}
        state = (outcome is None or outcome.job.identity, {**self.progress(), **slots})
        now = time.monotonic()
        since, before = self._last
        if state == before:
            self.longest_pause_s = max(self.longest_pause_s, now - since)
        else:
            self._last = now, state
        return outcome

    def recovery_s(self) -> float | None:
        """Time from the fault to the next attempt, or the next job of the replacement, if any."""
        if self.fault is None or not (strikes := self.fault.strikes()):
            return None
        process_id, struck_s = strikes[-1]
        outer_iter, job = self.fault.at
        later = [at_s - struck_s for (o, j, attempt), process, at_s in self.submitted
                 if at_s > struck_s and (process != process_id or attempt > 1) and o >= outer_iter and j == job]
        return min(later, default=None)
