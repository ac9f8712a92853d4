"""The protocol of worker pools, which run jobs for the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ngsgd.errors import FailureKind
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.training.job import Job, JobResult, Outcome, VectorRef
from ngsgd.training.parameter_vector import Vector


@dataclass(frozen=True)
class Retired:
    """An incident of the pool, such as a worker that died too often to be replaced again."""

    worker: int     # -1: not about one worker
    # one message: the observation and the next step
    message: str
    what: str = "worker_retired"   # kind of incident
    kind: FailureKind = FailureKind.UNKNOWN


class WorkerPool(Protocol):
    """N long-lived workers; the pool reports outcomes, and the coordinator acts on them."""

    def start(self) -> None:
        """Wait until the workers are ready; raise ClusterError if they cannot be started."""

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        """Let `write` fill a vector of the model's size that the workers can read."""

    def release(self, ref: VectorRef) -> None:
        """Free a vector that this pool published, or that a worker sent."""

    def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo) -> bool:
        """Take the outer step in the workers, if they can; else return False and change nothing.

        The state of the optimizer is then bitwise that of a step of the coordinator. Raises
        ResultsLost if workers are gone.
        """

    def num_idle(self) -> int:
        """Workers that can take a job now."""

    def num_workers_alive(self) -> int:
        """Workers that run a job or can take one."""

    def has_busy_start(self) -> bool:
        """Whether a worker that starts was busy since the last call: it imports or compiles."""

    def retired(self) -> list[Retired]:
        """Incidents since the last call."""

    def submit(self, job: Job) -> None:
        """Give a job to an idle worker."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """Return the outcome of a job; None after the timeout (the in-process pool ignores it)."""

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        """Per busy worker: identity of its job, and a number that changes with every minibatch."""

    def kill(self, worker: int, reason: str) -> None:
        """Kill and replace a hung worker; its job is reported as failed for that reason."""

    def stop_jobs(self, outer_iter: int) -> None:
        """Ask the workers to end their jobs of an outer iteration after the current minibatch."""

    def abandon(self) -> None:
        """Abandon the running jobs."""

    def close(self) -> None:
        """End the workers."""


class VectorRefcount:
    """Releases a vector to the pool when its last user releases it."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._needed: Counter[int] = Counter()
        self._refs: dict[int, VectorRef] = {}

    def acquire(self, ref: VectorRef | None) -> None:
        if ref is not None:
            # keeps the object, and therefore its id, alive
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
