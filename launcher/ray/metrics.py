"""Figures of a run as metrics of Ray, which its dashboard and Prometheus show.

The names are those of MLflow (docs/mlflow.md): `time/average_s` is `ngsgd_time_average_s`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import ray
from ray.util.metrics import Counter, Gauge

from ngsgd.cluster.exchange.collective import GatheredRef
from ngsgd.cluster.exchange.shared_memory import SharedRef, SharedSnapshotMemory
from ngsgd.launcher.ray.pool import RayPool, WorkerSlot
from ngsgd.training.job import Job, JobResult, LocalRef, VectorRef
from ngsgd.training.records import FinalReport, OuterIterationRecord, Tracker

# one metric of a name per process
GAUGES: dict[str, Gauge] = {}


def exported(name: str) -> str:
    """Return the name in Ray of a metric of MLflow; Prometheus adds `ray_`."""
    return f"ngsgd_{re.sub(r'[^A-Za-z0-9]', '_', name.lstrip('0123456789_'))}"


class RayMetrics(Tracker):
    """A tracker of a run on a Ray cluster; the metrics have the tag `run`.

    `figures` returns those of a record; its other argument is `elapsed_s` of the one before.
    """

    def __init__(self, run: str, figures: Callable[[OuterIterationRecord, float], Mapping[str, float]]) -> None:
        self._run, self._figures, self._before_s = run, figures, 0.0

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self._set(self._figures(record, self._before_s))
        self._before_s = record.elapsed_s

    def finished(self, report: FinalReport) -> None:
        errors = {"test": report.test_errors, "valid": report.valid_errors}
        self._set({"time/total_s": report.seconds, **{f"2_wer/{part}": found.wer for part, found in errors.items() if found}})

    def _set(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            # the pool has left a cluster whose head is lost
            if ray.is_initialized() and math.isfinite(value):
                key = exported(name)
                if key not in GAUGES:
                    GAUGES[key] = Gauge(key, f"{name} of docs/mlflow.md", ("run",))
                GAUGES[key].set(float(value), {"run": self._run})


class MeteredRayPool(RayPool):
    """Counts the bytes of parameters between the coordinator of `run` and its workers."""

    run = ""

    def start(self) -> None:
        super().start()
        self._bytes = Counter("ngsgd_parameter_bytes", "parameters sent to workers with their jobs, and received from them",
                              ("run", "direction", "way"))

    def _post(self, slot: WorkerSlot, job: Job, snapshots: SharedSnapshotMemory | None, *, keep: bool) -> None:
        super()._post(slot, job, snapshots, keep=keep)
        # a model that the worker gathered is not sent
        num_sent = (not isinstance(job.start.model, GatheredRef)) + (job.start.own is not None)
        self._count("sent", 4 * self._vectors.size * num_sent, is_shared=self._shares_memory(slot))

    def _readable(self, slot: WorkerSlot, result: JobResult) -> JobResult:
        # before a code is decoded
        size = result.encoded.nbytes if result.encoded is not None else self._num_bytes(result.sent)
        own = self._num_bytes(result.own) if result.own is not None and result.own is not result.sent else 0
        self._count("received", size + own, is_shared=isinstance(result.sent, SharedRef))
        return super()._readable(slot, result)

    def _num_bytes(self, ref: VectorRef) -> int:
        """Of a vector that arrives here; 0 for one that the worker keeps."""
        return 4 * ref.size if isinstance(ref, SharedRef) else ref.vector.nbytes if isinstance(ref, LocalRef) else 0

    def _count(self, direction: str, num_bytes: int, *, is_shared: bool) -> None:
        if num_bytes:
            self._bytes.inc(num_bytes, {"run": self.run, "direction": direction,
                                        "way": "shared_memory" if is_shared else "network"})
