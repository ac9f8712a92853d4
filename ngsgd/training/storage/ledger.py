"""The ledger: planned data, attempts and counted results of a run, one JSON line each.

`ngsgd.training.storage.audit` checks it, independently of the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngsgd.errors import FailureKind
from ngsgd.files import FORMATS, JsonLines
from ngsgd.schedules import Shard
from ngsgd.training.job import Job, JobFailure, JobResult, WorkItem
from ngsgd.training.planning import Plan

PIECE_FIELDS = ("archive", "frame", "outer_iter", "job", "first", "stop")


class Ledger:
    """Appends to `path`; `fence` is the number of the run lock of this process, 0 without a lock.

    A line survives the death of this process. After `sync` it survives the death of the machine.
    """

    def __init__(self, path: Path, fence: int = 0) -> None:
        self._lines = JsonLines(path)
        self._fence = fence

    def started(self, after: int, min_accepted_fraction: float) -> None:
        """Record that a process begins the run, or resumes it after a committed outer iteration."""
        fields = {"fence": self._fence} if self._fence else {}
        self._write("started", format=FORMATS["ledger"], after=after, min_accepted_fraction=min_accepted_fraction, **fields)

    def planned(self, plan: Plan) -> None:
        for job, pieces in enumerate(plan.work):
            self._write("planned", outer_iter=plan.outer_iter, job=job, pieces=[piece_fields(piece) for piece in pieces],
                        num_jobs=plan.num_jobs, lr=plan.iteration.lr, lr_factor=plan.iteration.lr_factor)

    def submitted(self, job: Job) -> None:
        self._write("submitted", **_identity(job))

    def failed(self, failure: JobFailure) -> None:
        self._write("failed", **_identity(failure.job), worker=failure.worker, reason=failure.reason, kind=failure.kind)

    def judged(self, result: JobResult, reason: str) -> None:
        """Record that a result was accepted (empty reason) or rejected."""
        self._write("rejected" if reason else "accepted", **_identity(result.job), worker=result.worker,
                    num_frames=result.num_frames, pieces=[piece_fields(piece) for piece in result.job.pieces],
                    left=[piece_fields(piece) for piece in result.remainder], digest=f"{result.digest:016x}", reason=reason,
                    **({"continued_at": result.continued_at} if result.continued_at else {}))

    def discarded(self, result: JobResult, reason: str) -> None:
        """Record a result that was ignored: late, duplicate, or damaged in transfer."""
        self._write("discarded", **_identity(result.job), worker=result.worker, reason=reason)

    def settled_without(self, event: str, job: Job, reason: str, kind: FailureKind = FailureKind.UNKNOWN) -> None:
        """Record work that this outer iteration skips: "dropped", "deferred" or "quarantined"."""
        self._write(event, **_identity(job), pieces=[piece_fields(piece) for piece in job.pieces], reason=reason,
                    **({"kind": kind} if kind else {}))

    def repeated(self, job: Job, worker: int) -> None:
        """Record that a job is repeated for the audit; the repetition is never counted."""
        self._write("repeated", **_identity(job), repeat=job.repeat, worker=worker)

    def audited(self, job: Job, outcome: str, runs: Sequence[tuple[int, str]], faulty: Sequence[int], comparison: str) -> None:
        """Record the end of an audit: (worker, digest) of the runs, and the workers at fault."""
        self._write("audited", **_identity(job), outcome=outcome, runs=[list(run) for run in runs], faulty=list(faulty),
                    comparison=comparison)

    def rolled_back(self, outer_iter: int, reason: str, lr_scale: float) -> None:
        self._write("rolled_back", outer_iter=outer_iter, reason=reason, lr_scale=lr_scale)

    def sync(self) -> None:
        """Flush all lines to disk, so that they survive a crash of the machine."""
        self._lines.sync()

    def committed(self, commit: Mapping[str, Any]) -> None:
        """Record a commit that is on disk; its manifest contains `commit` too."""
        self._write("committed", **commit)

    def close(self) -> None:
        self._lines.close()

    def _write(self, event: str, **fields: Any) -> None:
        self._lines.append({"event": event, **fields})


def piece_fields(piece: WorkItem) -> list[int | None]:
    """Convert a work item to PIECE_FIELDS."""
    return [piece.shard.archive, piece.shard.frame, piece.outer_iter, piece.job, piece.first, piece.stop]


def pieces_of(fields: Sequence[Sequence[Any]]) -> tuple[WorkItem, ...]:
    """Convert PIECE_FIELDS to work items."""
    return tuple(WorkItem(Shard(archive, frame), outer_iter, job, first, stop)
                 for archive, frame, outer_iter, job, first, stop in fields)


def _identity(job: Job) -> dict[str, int]:
    return {"outer_iter": job.outer_iter, "job": job.job, "attempt": job.attempt}
