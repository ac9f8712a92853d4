"""Names and values of the figures that trackers show; docs/mlflow.md has their reference table.

The part of a name before the slash is the section of its chart. MLflow sorts sections by name, so
the most important ones have a number.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig
from ngsgd.config.build import flatten
from ngsgd.config.unused import of_speech
from ngsgd.launcher.reports.efficiency import of_record, samples_per_second
from ngsgd.masking import masked
from ngsgd.training.records import FinalReport, JobRecord, OuterIterationRecord
from ngsgd.training.storage.event_log import events_of

# columns of the table of runs
COLUMNS = ("1_objf/valid", "1_objf/train", "1_loss/valid", "1_loss/train", "2_wer/test", "2_wer/valid", "3_accuracy/valid")
# more sections of charts are unreadable
_MAX_MACHINES = 32
# a parameter whose norm was zero has a change divided by a tiny number
_LARGEST_CHANGE = 1e3
# between two samples, where MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL is not set
_SAMPLE_S = 10.0


class Figures:
    """The figures of a run's records: what all trackers show, over the samples processed."""

    def __init__(self, config: RunConfig) -> None:
        self.is_speech = not config.task._target_
        # the x axis: frames or examples processed
        self.step = 0
        self._price = config.cluster.price_per_hour
        self._elapsed_s = self._cost = 0.0
        self._num_incidents = 0
        # names that have not been zero all the time: a chart of zeros has no information
        self._shown: set[str] = set()

    def count_incident(self) -> None:
        """Chart it with the next outer iteration; the messages are in events.jsonl."""
        self._num_incidents += 1

    def of(self, record: OuterIterationRecord) -> dict[str, float]:
        """Return the figures of an outer iteration; `count` it when they are stored."""
        found = {**run_metrics(record, is_speech=self.is_speech, before_s=self._elapsed_s),
                 "workers/incidents": self._num_incidents, "workers/cost": self._cost + self._cost_of(record)}
        self.step = record.frames_processed
        self._shown |= {name for name, value in found.items() if value}
        return {name: value for name, value in found.items() if name in self._shown}

    def count(self, record: OuterIterationRecord) -> None:
        self._cost += self._cost_of(record)
        self._elapsed_s, self.step = record.elapsed_s, record.frames_processed

    def _cost_of(self, record: OuterIterationRecord) -> float:
        return of_record(record, self._elapsed_s).cost(self._price)

    def of_result(self, report: FinalReport) -> dict[str, float]:
        """Return the figures of the final model."""
        self.step = report.frames_processed
        found = {"time/total_s": report.seconds}
        if report.test_errors and report.valid_errors:
            found |= {"2_wer/test": report.test_errors.wer, "2_wer/valid": report.valid_errors.wer,
                      "result/objf_valid": report.valid.objf, "result/accuracy_valid": report.valid.accuracy}
        return found | {f"result/{name.replace('/', '_')}": value for name, value in report.metrics.items()}


def settings_of(config: RunConfig) -> dict[str, str]:
    """Settings of a run by path, without passwords; of a custom task, those that apply to it."""
    return {name: masked(str(value)) for name, value in flatten(config).items() if not config.task._target_ or not of_speech(name)}


def records_of(run_dir: Path) -> list[tuple[int, OuterIterationRecord]]:
    """The outer iterations in a run's event log, each once, with the time stamp for its metrics."""
    log = run_dir / "events.jsonl"
    if not log.is_file():
        return []
    events = (event for event in events_of(log) if event.get("event") == "outer_iteration")
    latest = {record.outer_iter: record for record in map(OuterIterationRecord.from_json, events)}
    # the log has no clock: the file's time, and before it a millisecond an outer iteration, which
    # keeps them in order
    last_ms = int(log.stat().st_mtime * 1000)
    return [(last_ms - len(latest) + place, latest[outer_iter]) for place, outer_iter in enumerate(sorted(latest))]


def run_metrics(record: OuterIterationRecord, *, is_speech: bool = True, before_s: float = 0.0) -> dict[str, float]:
    """The figures of one outer iteration; `before_s` is `elapsed_s` of the one before."""
    per_s = samples_per_second(record, before_s)
    if is_speech:
        scores = {"1_objf/valid": record.valid.objf, "1_objf/train": record.train.objf,
                  "3_accuracy/valid": record.valid.accuracy,
                  "3_accuracy/train": record.train.accuracy, "throughput/frames_per_s": per_s}
    else:
        scores = {"1_loss/valid": -record.valid.objf, "1_loss/train": -record.train.objf, "throughput/examples_per_s": per_s}
    efficiency, sites = of_record(record, before_s), dict[str, float]()
    # an average over sites followed the outer iteration
    if found := record.sites:
        sites = {f"sites/{name}": found[name] for name in ("counted", "missed", "wait_s")}
        sites["sites/sent_mb"] = found["sent_bytes"] / 1e6
        sites["sites/received_mb"] = found["received_bytes"] / 1e6
    gain = {"optimizer/outer_gain": record.gain} if record.gain != 1.0 else {}
    # parameters that were zero before have no relative change
    changes = [one for one in record.relative_change.values() if one < _LARGEST_CHANGE]
    change = {"optimizer/relative_change_median": statistics.median(changes),
              "optimizer/relative_change_max": max(changes)} if changes else {}
    # LAYER/FIGURE: means over the layers
    layers: dict[str, list[float]] = {}
    for name, value in record.health.items():
        if not math.isnan(value):
            layers.setdefault(name.rpartition("/")[2], []).append(value)
    return {**scores, **_diagnostics(record, is_speech=is_speech), "optimizer/lr": record.effective_lr, **gain,
        "optimizer/layer_updates_clipped": record.max_change_share,
        "optimizer/model_updates_clipped": record.max_param_change_share, **change,
        **{f"natural_gradient/{name}": statistics.fmean(values) for name, values in layers.items()},
        "time/compute_s": record.compute_s, "time/average_s": record.average_s,
        "time/checkpoint_s": record.checkpoint_s, "time/diagnostics_s": record.diagnostics_s,
        "time/elapsed_s": record.elapsed_s, "progress/epoch": record.epoch,
        "workers/participation": efficiency.participation,
        "workers/effective_training_time": efficiency.effective_share,
        "workers/jobs_planned": record.num_jobs, "workers/jobs_accepted": record.num_accepted,
        "workers/skew": record.skew, "workers/alive": record.workers_alive,
        "workers/deaths": record.num_deaths, "workers/jobs_deferred": record.num_deferred,
        "workers/results_discarded": record.num_discarded, **sites,}


def _diagnostics(record: OuterIterationRecord, *, is_speech: bool) -> dict[str, float]:
    """Figures of the task's evaluation; those of layers (dead_units/LAYER) as means."""
    if not is_speech:
        return {name if name.startswith(("train/", "valid/")) else f"task/{name}": value
                for name, value in record.diagnostics.items()}
    found, dead = dict[str, float](), list[float]()
    for name, value in record.diagnostics.items():
        if name.startswith("dead_units/"):
            dead.append(value)
        else:
            found[f"task/{name.replace('/', '_')}"] = value
    return found | ({"task/dead_units": statistics.fmean(dead)} if dead else {})


class MachineLoad:
    """MLflow's own system metrics of this machine and all its GPUs, sampled by a thread.

    MLflow's own thread ends at the first request that its store does not answer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock, self._ends = folder, threading.Lock(), threading.Event()
        # empty until it starts
        self._monitors: list[Any] = []
        self._prefix = "system/"

    def taken(self) -> dict[str, float]:
        """Means of the samples since the last call, by MLflow's names; empty where it is off."""
        with self._lock:
            if not self._monitors:
                return {}
            self._collect()
            found = {name: value for one in self._monitors for name, value in one.aggregate_metrics().items()}
            for one in self._monitors:
                one.clear_metrics()
        with contextlib.suppress(OSError):
            found["output_dir_available_megabytes"] = shutil.disk_usage(self._folder).free / 1e6
        return {f"{self._prefix}{name}": float(value) for name, value in found.items()}

    def close(self) -> None:
        self._ends.set()

    def start(self) -> None:
        """Begin to sample; imports MLflow."""
        from mlflow import environment_variables as environment
        from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, gpu_monitor, network_monitor, rocm_monitor
        wanted = environment.MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
        if wanted.is_set() and not wanted.get():
            return
        monitors: list[Any] = [cpu_monitor.CPUMonitor(), disk_monitor.DiskMonitor(), network_monitor.NetworkMonitor()]
        for kind in (gpu_monitor.GPUMonitor, rocm_monitor.ROCMMonitor):
            # of whatever type, where the driver or its package is missing
            with contextlib.suppress(Exception):
                monitors.append(kind())
        if node := environment.MLFLOW_SYSTEM_METRICS_NODE_ID.get():
            self._prefix += f"{node}/"
        self._monitors, seconds = monitors, environment.MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or _SAMPLE_S
        threading.Thread(target=self._sample, args=(seconds,), name="system metrics", daemon=True).start()

    def _sample(self, seconds: float) -> None:
        while not self._ends.wait(seconds):
            with self._lock:
                self._collect()

    def _collect(self) -> None:
        # a figure that cannot be read now is missing in this sample
        with contextlib.suppress(Exception):
            for one in self._monitors:
                one.collect_metrics()


def of_machines(jobs: Iterable[JobRecord]) -> dict[str, float]:
    """Load of the machines of the jobs' workers but that of the coordinator, 32 at most."""
    # the last job of a machine counts
    machines = sorted({job.host: job.machine for job in jobs if job.host}.items())
    return {f"system/{host}/{name}": value for host, load in machines[:_MAX_MACHINES] for name, value in load.items()}


def load_of_machine(folder: Path) -> dict[str, float]:
    """Return load of processor, memory, network and GPUs, and free space on the disk of `folder`.

    Names are those of MLflow's system metrics; the network counts from the start of the machine.
    Unavailable figures are omitted. The processor load is the mean since the previous call of this
    process, and 0 at the first call.
    """
    found: dict[str, float] = {}
    with contextlib.suppress(ImportError, OSError):
        import psutil
        memory, network = psutil.virtual_memory(), psutil.net_io_counters()
        found = {"cpu_utilization_percentage": psutil.cpu_percent(), "system_memory_usage_percentage": memory.percent,
                 "system_memory_usage_megabytes": memory.used / 1e6, "network_transmit_megabytes": network.bytes_sent / 1e6,
                 "network_receive_megabytes": network.bytes_recv / 1e6}
        # last, because the folder may not exist on a worker
        found["output_dir_available_megabytes"] = psutil.disk_usage(str(folder)).free / 1e6
    return found | _load_of_gpus()


def _load_of_gpus() -> dict[str, float]:
    """Memory, utilization and power of all GPUs; empty without nvidia-ml-py or a driver."""
    try:
        import pynvml
    except ImportError:
        return {}
    found: dict[str, float] = {}
    # a driver may lack single figures
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            found |= {f"gpu_{index}_memory_usage_megabytes": memory.used / 1e6,
                      f"gpu_{index}_memory_usage_percentage": 100 * memory.used / memory.total}
            with contextlib.suppress(pynvml.NVMLError):
                found[f"gpu_{index}_utilization_percentage"] = float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
                found[f"gpu_{index}_power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000
    return found


def storable(value: float) -> float:
    """Replace infinity by not-a-number, which leaves a gap; MLflow would store it as 1.8e308."""
    return float(value) if math.isfinite(value) else math.nan
