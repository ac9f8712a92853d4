"""The measurement of `ngsgd plan`, stored with the runs, and the prediction made from it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from ngsgd.config import RunConfig
from ngsgd.files import read_json, write_text
from ngsgd.object_storage.urls import local_root
from ngsgd.pipeline.performance_model import planner
from ngsgd.pipeline.performance_model.planner import Machine, RunPrediction, Workload
from ngsgd.pipeline.performance_model.scaling import site_of
from ngsgd.training.records import FinalReport, OuterIterationRecord
from ngsgd.training.tracking import Tracker

_FORMAT = 1


def keep(config: RunConfig, machine: Machine, workload: Workload) -> None:
    """Writes down a measurement of these settings."""
    kept = {"format": _FORMAT, "settings": settings_key(config), "machine": machine.to_json(), "workload": asdict(workload)}
    write_text(kept_in(config), json.dumps(kept, indent=1))


def saved(config: RunConfig) -> tuple[Machine, Workload] | None:
    """The last measurement in this output directory, if settings and core count are the same."""
    try:
        kept = read_json(kept_in(config))
        if (kept["format"], kept["settings"]) != (_FORMAT, settings_key(config)):
            return None
        return Machine.from_json(kept["machine"]), Workload(**kept["workload"])
    except (OSError, ValueError, KeyError, TypeError):
        # there is none, or one of another version: measure again
        return None


def kept_in(config: RunConfig) -> Path:
    """The file."""
    return local_root(config.output_dir) / "plan.json"


def settings_key(config: RunConfig) -> str:
    """A digest of everything that the measurement depends on."""
    cluster = config.cluster
    parts = [asdict(part) for part in (config.data, config.features, config.egs, config.model, config.optimizer)]
    rest = [config.schedule.minibatch_size, config.schedule.num_epochs, cluster.threads_per_worker, cluster.device, os.cpu_count(),
            # without task.search_path, which a run makes absolute
            config.task._target_, dict(config.task.args or {})]
    return hashlib.sha256(json.dumps([*parts, *rest]).encode()).hexdigest()[:16]


class Forecast(Tracker):
    """A tracker that reports the predicted and the measured time at the end.

    The prediction uses the measurement of `ngsgd plan` with the same settings, else the first outer
    iterations of the run.  `job_counts` has the number of jobs of each outer iteration.
    """

    def __init__(self, config: RunConfig, job_counts: Sequence[int], report: Callable[[str], None]) -> None:
        self._config, self._job_counts, self._report = config, job_counts, report
        self._records: list[OuterIterationRecord] = []

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self._records.append(record)

    def finished(self, report: FinalReport) -> None:
        predicted = self.prediction()
        for line in planner.compare(self._records, predicted) if predicted else []:
            self._report(line)

    def prediction(self) -> RunPrediction | None:
        """None while there is nothing to predict from."""
        config = self._config
        num_workers = config.cluster.num_workers
        # the measurement is of jobs of equal length on this machine that do not overlap
        fits = not config.cluster.address and config.schedule.load_balancing == "none" and not config.outer.overlap
        measured = saved(config) if fits else None
        if measured:
            machine, workload = measured
            return planner.predict_run(machine, workload, site_of(machine, config, num_workers), self._job_counts,
                                       num_workers=num_workers)
        slots = 1 if config.cluster.kind == "in_process" else num_workers
        if not config.cluster.address:
            slots = min(slots, os.cpu_count() or 1)
        return planner.extrapolate(self._records, self._job_counts, num_slots=slots)
