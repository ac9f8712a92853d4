"""The protocol of worker pools: where jobs run, as the coordinator sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ngsgd.training.job import Job, JobResult, Outcome, VectorRef
from ngsgd.training.parameter_vector import Mean, Vector


@dataclass(frozen=True)
class Retired:
    """A worker that died too often to be replaced once more, or another incident that only the pool sees."""

    worker: int     # -1: not about one
    # one sentence: what was seen, and what to do
    message: str
    what: str = "worker_retired"   # kind of incident


class WorkerPool(Protocol):
    """N long-lived workers.  A pool reports how a job ended; what to do about it is the coordinator's business."""

    def start(self) -> None:
        """Waits until the workers are ready; ClusterError when they cannot be had."""

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        """Lets `write` fill a vector of the model's size, which the workers can then read."""

    def release(self, ref: VectorRef) -> None:
        """What this pool published, or a worker sent, is not needed any more."""

    def mean(self, results: Sequence[JobResult], weights: Sequence[float]) -> Mean | None:
        """The weighted mean of what the workers sent, where they can make it among themselves; None: the coordinator has to.

        It has the coordinator's bits.  Raises ResultsLost where workers are gone with their results.
        """

    def num_idle(self) -> int:
        """Workers that could take a job now."""

    def num_workers_alive(self) -> int:
        """Workers that are running a job or could take one."""

    def retired(self) -> list[Retired]:
        """Workers that were given up since the last call."""

    def submit(self, job: Job) -> None:
        """Gives a job to an idle worker."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """How a running job ended; None when none has within the time (the in-process pool ignores it)."""

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        """For each worker that has a job: which, and a number that changes with every minibatch."""

    def kill(self, worker: int, reason: str) -> None:
        """Ends a worker that hangs; its job is then reported as failed for that reason, and another worker replaces it."""

    def stop_jobs(self) -> None:
        """Asks the workers to end their jobs after the minibatch at hand and to return what they have."""

    def abandon(self) -> None:
        """Gives up the jobs that are running."""

    def close(self) -> None:
        """Ends the workers."""


class VectorRefcount:
    """Releases a vector to the pool when its last user releases it."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._needed: Counter[int] = Counter()
        self._refs: dict[int, VectorRef] = {}

    def acquire(self, ref: VectorRef | None) -> None:
        if ref is not None:
            # keeps the object, and so its id, alive
            self._refs[id(ref)] = ref
            self._needed[id(ref)] += 1

    def release(self, ref: VectorRef | None) -> None:
        if ref is None:
            return
        self._needed[id(ref)] -= 1
        if not self._needed[id(ref)]:
            del self._needed[id(ref)]
            self.pool.release(self._refs.pop(id(ref)))

    def release_if_unused(self, ref: VectorRef | None) -> None:
        """Release a vector to the pool unless it has users."""
        self.acquire(ref)
        self.release(ref)
