"""The ledger: every shard that was planned, every try, and what was counted, one JSON line each.

It is written as things happen and audited afterwards by `audit`, which knows nothing of the coordinator.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ngsgd.files import read_json_lines
from ngsgd.schedules import OuterIteration
from ngsgd.training.job import Job, JobFailure, JobResult


class Ledger:
    """Appends to `path`; a line is on disk before the next thing happens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def planned(self, plan: OuterIteration) -> None:
        for job, shard in enumerate(plan.shards):
            self._write("planned", outer_iter=plan.outer_iter, job=job, archive=shard.archive, frame=shard.frame)

    def submitted(self, job: Job) -> None:
        self._write("submitted", outer_iter=job.outer_iter, job=job.job, attempt=job.attempt)

    def failed(self, failure: JobFailure) -> None:
        self._write("failed", outer_iter=failure.job.outer_iter, job=failure.job.job, attempt=failure.job.attempt,
                    worker=failure.worker, reason=failure.reason)

    def judged(self, result: JobResult, reason: str) -> None:
        """A result was accepted (no reason) or rejected."""
        self._write("rejected" if reason else "accepted", outer_iter=result.job.outer_iter, job=result.job.job,
                    attempt=result.job.attempt, worker=result.worker, num_frames=result.num_frames,
                    archive=result.job.shard.archive, frame=result.job.shard.frame, reason=reason)

    def dropped(self, job: Job, reason: str) -> None:
        """A shard that is not counted in this outer iteration after all its attempts failed."""
        self._write("dropped", outer_iter=job.outer_iter, job=job.job, attempt=job.attempt, reason=reason)

    def committed(self, outer_iter: int, frames_processed: int, model_sha256: str) -> None:
        self._write("committed", outer_iter=outer_iter, frames_processed=frames_processed, model=model_sha256)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def audit(path: Path) -> list[str]:
    """What is wrong with a run's ledger; an empty list when every planned shard was counted exactly once.

    An outer iteration that was interrupted is planned again; only its last plan, the one that was committed, counts.
    """
    problems: list[str] = []
    committed: list[int] = []
    frames = 0
    planned: dict[int, dict[str, Any]] = {}
    settled: list[dict[str, Any]] = []
    for line in read_json_lines(path):
        if line["event"] == "planned":
            if line["job"] == 0:
                planned, settled = {}, []
            planned[line["job"]] = line
        elif line["event"] in ("accepted", "rejected", "dropped"):
            settled.append(line)
        elif line["event"] == "committed":
            outer_iter = line["outer_iter"]
            frames += sum(entry.get("num_frames", 0) for entry in settled if entry["event"] == "accepted")
            problems += _unsettled(outer_iter, planned, settled)
            if frames != line["frames_processed"]:
                problems.append(f"outer iteration {outer_iter}: {frames} frames accepted, {line['frames_processed']} committed")
            committed.append(outer_iter)
    if committed != list(range(len(committed))):
        problems.append(f"committed outer iterations are {committed}")
    return problems


def _unsettled(outer_iter: int, planned: dict[int, dict[str, Any]], settled: list[dict[str, Any]]) -> list[str]:
    counts = Counter(entry["job"] for entry in settled)
    where = f"outer iteration {outer_iter}: job"
    problems = [f"{where} {job} was settled {counts[job]} times" for job in planned if counts[job] != 1]
    problems += [f"{where} {job} was not planned" for job in counts if job not in planned]
    problems += [f"{where} {entry['job']} counted another shard" for entry in settled
                 if entry["event"] == "accepted" and entry["job"] in planned
                 and any(entry[key] != planned[entry["job"]][key] for key in ("archive", "frame", "outer_iter"))]
    return problems
