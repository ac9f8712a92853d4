"""Memory for snapshots that the coordinator's process keeps for running and failed jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ngsgd.training.job import Job, JobFailure, JobResult, Outcome
from ngsgd.training.records import Incident
from ngsgd.training.settings import EngineSettings

Memory = TypeVar("Memory")


class MemoryStore(Protocol[Memory]):
    """Allocates memory for snapshots."""

    def allocate(self) -> Memory:
        """Return memory without a snapshot."""

    def release(self, memory: Memory) -> None:
        """Return memory for reuse; no process may still write to it."""

    def discard(self, memory: Memory) -> None:
        """Never reuse memory: an abandoned process may still write to it."""

    def newest(self, memory: Memory) -> int:
        """Minibatches of the newest snapshot; 0 without one."""

    def close(self) -> None:
        """Free all memory."""


@dataclass
class _Entry(Generic[Memory]):
    memory: Memory
    # newest snapshot at the start of the attempt
    began_at: int = 0
    # worker that runs the attempt; None between two attempts
    worker: int | None = None


class SnapshotBook(Generic[Memory]):
    """Which memory belongs to which job; without a store no job has snapshots.

    A retry gets the memory of the failed attempt. If an attempt that continued from a snapshot
    fails without a later one, the snapshot itself may be the cause: the next attempt starts at the
    beginning of the job.
    """

    def __init__(self, store: MemoryStore[Memory] | None) -> None:
        self._store = store
        self._entries: dict[tuple[int, int], _Entry[Memory]] = {}

    def lend(self, job: Job, worker: int) -> Memory | None:
        """Return the memory of a job; None if another worker runs it now, as for an audit."""
        if self._store is None:
            return None
        # jobs of at most two outer iterations run together
        for key in [key for key in self._entries if key[0] < job.outer_iter - 1]:
            self._forget(key)
        key = (job.outer_iter, job.job)
        if key not in self._entries:
            self._entries[key] = _Entry(self._store.allocate())
        entry = self._entries[key]
        if entry.worker is not None:
            return None
        entry.worker = worker
        entry.began_at = self._store.newest(entry.memory)
        return entry.memory

    def newest(self, memory: Memory) -> int:
        """Return the minibatches of the newest snapshot; 0 without one."""
        return self._store.newest(memory) if self._store is not None else 0

    def ended(self, outcome: Outcome) -> None:
        """Process the outcome of an attempt whose worker lives."""
        if isinstance(outcome, JobFailure) or outcome.remainder:
            self.failed(outcome.job, outcome.worker)
        elif self._holds(outcome.job, outcome.worker):
            self._forget((outcome.job.outer_iter, outcome.job.job))

    def failed(self, job: Job, worker: int, *, is_gone: bool = True) -> None:
        """Keep the snapshots of a failed attempt, unless they may be its cause or are written."""
        key = (job.outer_iter, job.job)
        if self._store is None or not self._holds(job, worker):
            return
        entry = self._entries[key]
        entry.worker = None
        if not is_gone:
            self._store.discard(self._entries.pop(key).memory)
        elif self._store.newest(entry.memory) == entry.began_at:
            self._forget(key)

    def close(self) -> None:
        self._entries.clear()
        if self._store is not None:
            self._store.close()

    def _holds(self, job: Job, worker: int) -> bool:
        entry = self._entries.get((job.outer_iter, job.job))
        return entry is not None and entry.worker == worker

    def _forget(self, key: tuple[int, int]) -> None:
        if key in self._entries and self._store is not None:
            self._store.release(self._entries.pop(key).memory)


def continued(result: JobResult) -> Incident:
    """The incident of a job that was continued."""
    job = result.job
    message = (f"worker {result.worker} continued job {job.job} of outer iteration {job.outer_iter + 1} at its snapshot after "
               f"minibatch {result.continued_at} of {result.num_minibatches}, in attempt {job.attempt}.")
    return Incident("job_continued", message, job.outer_iter, job.job, result.worker)


def takes_snapshots(settings: EngineSettings) -> bool:
    """Whether retries continue from snapshots with these settings."""
    failure = settings.failure
    return failure.snapshots != "off" and failure.policy == "retry" and settings.cluster.ranks_per_worker == 1
