"""Names and values of the metrics in MLflow; docs/mlflow.md has their reference table.

The part of a name before the slash is the section of its chart. MLflow sorts sections by name, so
the most important ones have a number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from ngsgd.launcher.reports.efficiency import of_record
from ngsgd.training.records import JobRecord, OuterIterationRecord

# columns of the table of runs
COLUMNS = ("1_objf/valid", "1_objf/train", "1_loss/valid", "1_loss/train", "2_wer/test", "2_wer/valid", "3_accuracy/valid")
# more sections of charts are unreadable
_MAX_MACHINES = 32
# of the machine, since it started
_COUNTERS = ("network_sent_mb", "network_received_mb")
# a parameter whose norm was zero has a change divided by a tiny number
_LARGEST_CHANGE = 1e3


def run_metrics(record: OuterIterationRecord, *, is_speech: bool = True, before_s: float = 0.0) -> dict[str, float]:
    """The figures of one outer iteration.

    Args:
        record: the outer iteration.
        is_speech: objectives per frame; otherwise losses per example.
        before_s: `elapsed_s` of the outer iteration before.
    """
    num_frames = sum(job.num_frames for job in record.jobs if job.accepted)
    per_s = num_frames / max(record.elapsed_s - (before_s if before_s < record.elapsed_s else 0.0), 1e-9)
    if is_speech:
        scores = {"1_objf/valid": record.valid.objf, "1_objf/train": record.train.objf,
                  "3_accuracy/valid": record.valid.accuracy, "3_accuracy/train": record.train.accuracy,
                  "throughput/frames_per_s": per_s}
    else:
        scores = {"1_loss/valid": -record.valid.objf, "1_loss/train": -record.train.objf, "throughput/examples_per_s": per_s}
    efficiency, sites = of_record(record, before_s), dict[str, float]()
    # an average over sites followed the outer iteration
    if found := record.sites:
        sites = {f"sites/{name}": found[name] for name in ("counted", "missed", "wait_s")}
        sites["sites/sent_mb"] = found["sent_bytes"] / 1e6
        sites["sites/received_mb"] = found["received_bytes"] / 1e6
    return {
        **scores, **_diagnostics(record, is_speech=is_speech),
        "optimizer/lr": record.effective_lr, **({"optimizer/outer_gain": record.gain} if record.gain != 1.0 else {}),
        "optimizer/layer_updates_clipped": record.max_change_share,
        "optimizer/model_updates_clipped": record.max_param_change_share,
        **_relative_change(record), **_over_layers("natural_gradient", record.health),
        "time/compute_s": record.compute_s, "time/average_s": record.average_s,
        "time/checkpoint_s": record.checkpoint_s, "time/diagnostics_s": record.diagnostics_s,
        "time/elapsed_s": record.elapsed_s, "progress/epoch": record.epoch,
        "workers/participation": efficiency.participation,
        "workers/effective_training_time": efficiency.effective_share,
        "workers/jobs_planned": record.num_jobs, "workers/jobs_accepted": record.num_accepted,
        "workers/skew": record.skew, "workers/alive": record.workers_alive,
        "workers/deaths": record.num_deaths, "workers/jobs_deferred": record.num_deferred,
        "workers/results_discarded": record.num_discarded,
        **sites,
    }


def _diagnostics(record: OuterIterationRecord, *, is_speech: bool) -> dict[str, float]:
    """Figures of the task's evaluation; those of layers, such as dead_units/LAYER, as means over
    the layers.
    """
    if not is_speech:
        return {name if name.startswith(("train/", "valid/")) else f"task/{name}": value
                for name, value in record.diagnostics.items()}
    dead = [value for name, value in record.diagnostics.items() if name.startswith("dead_units/")]
    rest = {f"task/{name.replace('/', '_')}": value for name, value in record.diagnostics.items()
            if not name.startswith("dead_units/")}
    return {**rest, **({"task/dead_units": statistics.fmean(dead)} if dead else {})}


def _relative_change(record: OuterIterationRecord) -> dict[str, float]:
    """Median and maximum over the parameters; those that were zero before have no relative change.
    """
    changes = [change for change in record.relative_change.values() if change < _LARGEST_CHANGE]
    return {"optimizer/relative_change_median": statistics.median(changes),
            "optimizer/relative_change_max": max(changes)} if changes else {}


def _over_layers(section: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Means over the layers of figures that are named LAYER/FIGURE."""
    by_figure: dict[str, list[float]] = {}
    for name, value in figures.items():
        if not math.isnan(value):
            by_figure.setdefault(name.rpartition("/")[2], []).append(value)
    return {f"{section}/{figure}": statistics.fmean(values) for figure, values in by_figure.items()}


def worker_metrics(jobs: list[JobRecord], *, is_speech: bool = True) -> dict[str, float]:
    """One worker's share of one outer iteration; the names are equal in all nested runs, so that
    charts overlay workers.
    """
    num_frames = max(sum(job.num_frames for job in jobs), 1)
    seconds = sum(job.seconds for job in jobs)

    def mean(values: Iterable[float]) -> float:
        return sum(value * job.num_frames for value, job in zip(values, jobs, strict=True)) / num_frames

    if is_speech:
        scores = {"job/objf": mean(job.objf for job in jobs), "job/frame_accuracy": mean(job.accuracy for job in jobs),
                  "job/frames_per_second": num_frames / max(seconds, 1e-9)}
    else:
        scores = {"job/loss": -mean(job.objf for job in jobs), "job/examples_per_second": num_frames / max(seconds, 1e-9)}
    return {
        **scores, "job/seconds": seconds,
        "job/max_change_share": mean(job.max_change_share for job in jobs),
    }


class SystemMetrics:
    """The load of the coordinator's machine and of each that has workers, up to 32.

    The counters of the network become rates.
    """

    def __init__(self) -> None:
        # machine -> when, and its load then
        self._before: dict[str, tuple[float, Mapping[str, float]]] = {}

    def of(self, own: Mapping[str, float], jobs: Iterable[JobRecord], at_s: float) -> dict[str, float]:
        """Metrics by name.

        Args:
            own: load of this machine; empty where it is not known.
            jobs: jobs of one outer iteration, whose workers report the load of theirs.
            at_s: when that was, on any clock.
        """
        # the last job of a machine counts
        machines = {job.host: job.machine for job in jobs if job.host}
        figures = {f"system/{name}": value for name, value in self._with_rates("", own, at_s).items()}
        for host, machine in sorted(machines.items())[:_MAX_MACHINES]:
            figures |= {f"system/{host}/{name}": value for name, value in self._with_rates(host, machine, at_s).items()}
        return figures

    def _with_rates(self, host: str, load: Mapping[str, float], at_s: float) -> dict[str, float]:
        before_s, before = self._before.get(host, (at_s, {}))
        self._before[host] = at_s, load
        seconds = at_s - before_s
        rates = {f"{name}_per_s": max(load[name] - before[name], 0.0) / seconds for name in _COUNTERS
                 if seconds > 0 and name in load and name in before}
        return {**{name: value for name, value in load.items() if name not in _COUNTERS}, **rates}


def storable(value: float) -> float:
    """Replace infinity by not-a-number, which leaves a gap; MLflow would store it as 1.8e308."""
    return float(value) if math.isfinite(value) else math.nan
