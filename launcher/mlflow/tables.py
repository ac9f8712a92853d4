"""Tables of a run for MLflow's artifacts: one row per worker, one row per layer."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ngsgd.training.records import JobRecord, OuterIterationRecord


@dataclass
class _Row:
    """Sums of one worker."""

    host: str = ""
    num_jobs: int = 0
    num_frames: int = 0
    busy_s: float = 0.0
    # until the slowest job of the outer iteration ended
    wait_s: float = 0.0
    num_retries: int = 0
    num_rejected: int = 0


@dataclass
class WorkerTable:
    """Adds up the jobs of each worker."""

    rows: dict[int, _Row] = field(default_factory=dict)

    def add(self, record: OuterIterationRecord) -> None:
        """Count the jobs of one outer iteration."""
        busy: dict[int, float] = {}
        for job in record.jobs:
            self._count(job)
            busy[job.worker] = busy.get(job.worker, 0.0) + job.seconds
        slowest_s = max(busy.values(), default=0.0)
        for worker, seconds in busy.items():
            self.rows[worker].wait_s += slowest_s - seconds

    def _count(self, job: JobRecord) -> None:
        row = self.rows.setdefault(job.worker, _Row())
        row.host = job.host or row.host
        row.num_jobs += 1
        row.num_frames += job.num_frames
        row.busy_s += job.seconds
        row.num_retries += job.attempt > 1
        row.num_rejected += not job.accepted

    def csv(self, unit: str) -> str:
        """The table; `unit` is frames or examples."""
        return _csv([{"worker": worker, "host": row.host or "coordinator", "jobs": row.num_jobs, unit: row.num_frames,
                      f"{unit}_per_s": round(row.num_frames / max(row.busy_s, 1e-9), 1), "busy_s": round(row.busy_s, 2),
                      "wait_s": round(row.wait_s, 2), "retries": row.num_retries, "rejected": row.num_rejected}
                     for worker, row in sorted(self.rows.items())])


def layer_csv(record: OuterIterationRecord) -> str:
    """Per layer, the natural-gradient figures and relative changes of one outer iteration; empty
    without any.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, value in record.health.items():
        layer, _, figure = name.rpartition("/")
        rows.setdefault(layer, {"layer": layer})[figure] = f"{value:.6g}"
    for name, value in record.relative_change.items():
        layer, _, parameter = name.rpartition(".")
        rows.setdefault(layer, {"layer": layer})[f"{parameter}_relative_change"] = f"{value:.6g}"
    return _csv(list(rows.values()))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
