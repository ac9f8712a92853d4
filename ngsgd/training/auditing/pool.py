"""The part of a worker pool that the audit needs: workers by name, and jobs for a chosen worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ngsgd.training.job import Job

# reason of the failures of jobs on such a worker
QUARANTINED = "is in quarantine, because the audit found it at fault"


@dataclass(frozen=True)
class WorkerIdentity:
    """Name and arithmetic of a worker."""

    # for people, such as "worker 3 (process 4711 on node-b)"
    name: str
    # machine; the audit prefers workers on different machines
    host: str = ""
    # digest of the numeric fingerprint: workers with equal values give bitwise identical results
    bits: str = ""
    # False for GPUs, whose kernels add in no fixed order
    is_reproducible: bool = True


@runtime_checkable
class AuditablePool(Protocol):
    """A pool with more than one worker process."""

    def idle_workers(self) -> Sequence[int]:
        """Workers that can take a job now."""

    def workers_alive(self) -> Sequence[int]:
        """Workers that run a job or can take one."""

    def worker_of(self, job: Job) -> int:
        """The worker that runs a job; -1 if none does."""

    def identity_of(self, worker: int) -> WorkerIdentity:
        """Name and arithmetic of a worker that is alive."""

    def submit_to(self, job: Job, worker: int) -> None:
        """Give a job to an idle worker."""

    def quarantine(self, worker: int) -> str:
        """End a worker and use its hardware no more; return the consequence, for a message.

        A job that it runs, and a result that was not delivered yet, are reported as failed for the
        reason `QUARANTINED`.
        """
