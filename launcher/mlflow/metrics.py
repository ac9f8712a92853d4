"""Names and values of what MLflow charts; the part of a name before the slash is the section of its chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ngsgd.training.records import JobRecord, OuterIterationRecord

# more sections of charts nobody looks at
_MAX_MACHINES = 32


def run_metrics(record: OuterIterationRecord, *, is_speech: bool = True) -> dict[str, float]:
    """The figures of one outer iteration; the part before the slash is MLflow's chart section."""
    scores = {
        "train/objf": record.train.objf, "train/frame_accuracy": record.train.accuracy,
        "train/running_objf": record.objf,
        "valid/objf": record.valid.objf, "valid/frame_accuracy": record.valid.accuracy,
    }
    own: dict[str, float] = {}
    if not is_speech:
        own = {name: value for name, value in record.diagnostics.items() if name.startswith(("train/", "valid/"))}
        scores = {"train/loss": -record.train.objf, "train/running_loss": -record.objf, "valid/loss": -record.valid.objf, **own}
    return {
        **scores,
        "lr/effective": record.effective_lr, "lr/job": record.lr, "lr/outer_gain": record.gain,
        "max_change/layer_share": record.max_change_share, "max_change/model_share": record.max_param_change_share,
        "time/compute_s": record.compute_s, "time/average_s": record.average_s,
        "time/checkpoint_s": record.checkpoint_s, "time/diagnostics_s": record.diagnostics_s,
        "cluster/jobs_planned": record.num_jobs, "cluster/jobs_accepted": record.num_accepted,
        "cluster/skew": record.skew, "cluster/workers_alive": record.workers_alive, "cluster/deaths": record.num_deaths,
        "cluster/deferred": record.num_deferred, "cluster/discarded": record.num_discarded,
        "cluster/patience_s": record.patience_s,
        "progress/outer_iter": record.outer_iter, "progress/epoch": record.epoch,
        "progress/elapsed_s": record.elapsed_s,
        **{f"relative_change/{layer}": change for layer, change in record.relative_change.items()},
        **{f"diagnostics/{name}": value for name, value in record.diagnostics.items() if name not in own},
        **{f"natural_gradient/{name}": value for name, value in record.health.items()},
    }


def worker_metrics(jobs: list[JobRecord], *, is_speech: bool = True) -> dict[str, float]:
    """One worker's share of one outer iteration; the same names in every child run, so that charts overlay workers."""
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


def system_metrics(own: Mapping[str, float], jobs: Iterable[JobRecord]) -> dict[str, float]:
    """The load of the coordinator's machine and of each that has workers, up to 32, in a section of its own."""
    # the last job of a machine tells
    machines = {job.host: job.machine for job in jobs if job.host}
    figures = {f"system/{name}": value for name, value in own.items()}
    for host, machine in sorted(machines.items())[:_MAX_MACHINES]:
        figures |= {f"system/{host}/{name}": value for name, value in machine.items()}
    return figures


def storable(value: float) -> float:
    """MLflow stores infinity as 1.8e308, which flattens every chart; not-a-number leaves a gap, as it should."""
    return float(value) if math.isfinite(value) else math.nan
