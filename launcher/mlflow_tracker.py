"""A run in MLflow: settings, curves over frames processed, one child run per worker, pictures and the final model.

MLflow may be slow (a fresh SQLite schema takes 8 s) or down.  Everything here happens in one background thread, and no
error of it reaches training: the first is told, the rest are counted, and the event log in the run folder has it all.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher import values
from ngsgd.config import RunConfig
from ngsgd.files import write_text
from ngsgd.training.records import FinalReport, Incident, JobRecord, OuterIterationRecord

CLOSE_TIMEOUT_S = 15.0
_MAX_WORKER_RUNS = 32            # each costs one request per outer iteration; more lines in a chart nobody can read
_PARAMS_PER_BATCH = 100          # MLflow's limit
# MLflow draws runs in colours of its own that may be two shades of one; ours are told apart
_COLOURS = ("#1f6fb4", "#e07b1a", "#2f8f4e", "#c0392b", "#7d4fb0", "#8c6d31", "#17a2b8", "#d6499e")
_BAD_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. /]")  # colons are allowed too, but not in file names

Warn = Callable[[str], None]


def tracking_uri(config: RunConfig) -> str:
    """The configured store, or SQLite in the output directory."""
    return config.tracking.uri or sqlite_uri(Path(config.output_dir))


def sqlite_uri(output_dir: Path) -> str:
    return f"sqlite:///{output_dir.absolute() / 'mlflow.db'}"


class MlflowTracker:
    """Sends a run's records to MLflow; a run folder that already has a tracking.json continues the run named there."""

    def __init__(self, config: RunConfig, run_dir: Path, run_name: str, warn: Warn, *,
                 make_client: Callable[[str], Any] | None = None) -> None:
        self._run = _MlflowRun(config, run_dir.absolute(), run_name, make_client or _make_client)
        self._warn = warn
        self._num_dropped = 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work.put(lambda: None)  # opens the run at once, while data and workers get ready
        # a daemon, so that a store that never answers cannot keep the process alive
        self._thread = threading.Thread(target=self._serve, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str:
        """Empty until the store has answered."""
        return self._run.run_id

    @property
    def experiment_id(self) -> str:
        return self._run.experiment_id

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self._work.put(lambda: self._run.log_outer_iteration(record))

    def incident(self, incident: Incident) -> None:
        self._work.put(self._run.count_incident)

    def finished(self, report: FinalReport) -> None:
        self._work.put(lambda: self._run.log_result(report))

    def close(self, status: str) -> None:
        """Waits for what is still to be sent, but not for ever."""
        self._work.put(lambda: self._run.end(status))
        self._work.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn(f"MLflow did not answer within {CLOSE_TIMEOUT_S:.0f} s; the run may be incomplete there, "
                       f"events.jsonl in {self._run.run_dir} has everything.")
        elif self._num_dropped > 1:
            self._warn(f"{self._num_dropped} updates did not reach MLflow; "
                       f"events.jsonl in {self._run.run_dir} has them.")

    def _serve(self) -> None:
        while (action := self._work.get()) is not None:
            try:
                self._run.open()
                action()
            except Exception as error:  # whatever it is, training must go on
                self._num_dropped += 1
                if self._num_dropped == 1:
                    self._warn(f"MLflow cannot be written ({_first_line(error)}); training goes on, "
                               f"events.jsonl in {self._run.run_dir} has everything.")


class _MlflowRun:
    """The conversation with MLflow; lives in the background thread."""

    def __init__(self, config: RunConfig, run_dir: Path, run_name: str, make_client: Callable[[str], Any]) -> None:
        self.run_dir = run_dir
        self.run_id = ""
        self.experiment_id = ""
        self._config = config
        self._run_name = run_name
        self._make_client = make_client
        self._client: Any = None
        self._uri = tracking_uri(config)
        self._worker_runs: dict[int, str] = {}
        self._num_incidents = 0
        self._frames_processed = 0

    def open(self) -> None:
        """Finds or makes the run; does nothing when that is done."""
        if self.run_id:
            return
        self._client = self._client or self._make_client(self._uri)
        run_id = self._continued() or self._created()
        self._client.log_artifact(run_id, str(self.run_dir / "config.yaml"))
        self.run_id = run_id  # last: had anything above failed, the next record tries again

    def log_outer_iteration(self, record: OuterIterationRecord) -> None:
        self._frames_processed = record.frames_processed
        # the workers' charts show the mean over the jobs until the workers are unfolded; they would be empty otherwise
        jobs = [job for job in record.jobs if job.accepted]
        self._log(self.run_id, run_metrics(record) | worker_metrics(jobs) | {"cluster/incidents": self._num_incidents})
        by_worker: dict[int, list[JobRecord]] = {}
        for job in record.jobs:
            if job.accepted and 0 <= job.worker < _MAX_WORKER_RUNS:
                by_worker.setdefault(job.worker, []).append(job)
        for worker, jobs in sorted(by_worker.items()):
            self._log(self._worker_run(worker), worker_metrics(jobs))

    def count_incident(self) -> None:
        """Charted with the next outer iteration; the sentences are in events.jsonl."""
        self._num_incidents += 1

    def log_result(self, report: FinalReport) -> None:
        self._frames_processed = report.frames_processed
        result = {"time/total_s": report.seconds}  # the scores on fixed frames came with the last outer iteration
        if report.wer:
            result |= {"test/wer": report.wer_percent, "valid/wer": _percent(report.valid_wer)}
            self._client.set_tag(self.run_id, "mlflow.note.content", f"test: {report.wer}\n\nvalid: {report.valid_wer}")
        self._log(self.run_id, result)

    def end(self, status: str) -> None:
        """Files last, because only now are they whole."""
        for name in ("events.jsonl", "learning_curve.png", "ledger.jsonl"):
            if (self.run_dir / name).is_file():
                self._client.log_artifact(self.run_id, str(self.run_dir / name))
        for folder in ("final", "decode"):
            if (self.run_dir / folder).is_dir():
                self._client.log_artifacts(self.run_id, str(self.run_dir / folder), folder)
        for run_id in (*self._worker_runs.values(), self.run_id):
            self._client.set_terminated(run_id, status)

    def _log(self, run_id: str, figures: Mapping[str, float]) -> None:
        """One request for all figures, at the current number of frames."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_BAD_IN_NAMES.sub("_", name), _storable(value), now_ms, self._frames_processed)
                   for name, value in figures.items()]
        self._client.log_batch(run_id, metrics=metrics)

    def _continued(self) -> str:
        """The run that the folder belongs to, set running again; empty when there is none in this store."""
        stored = read_tracking(self.run_dir)
        if stored.get("tracking_uri") != self._uri:
            return ""
        worker_runs = {int(worker): str(run) for worker, run in stored["worker_runs"].items()}
        try:
            for run in (stored["run_id"], *worker_runs.values()):
                self._client.update_run(run, status="RUNNING")
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""  # the store was emptied meanwhile: the rest of the run goes to a new one
        self.experiment_id, self._worker_runs = str(stored["experiment_id"]), worker_runs
        return str(stored["run_id"])

    def _created(self) -> str:
        from mlflow.entities import Param

        self.experiment_id = self._experiment()
        num_runs = len(list(self.run_dir.parent.glob("*/tracking.json")))
        tags = {**_origin(num_runs), **_versions()}
        run_id = str(self._client.create_run(self.experiment_id, tags=tags, run_name=self._run_name).info.run_id)
        # only here: MLflow refuses to change a parameter, and a resumed run has the same ones anyway
        params = [Param(name, str(value) or "''") for name, value in values.flatten(self._config).items()]
        for first in range(0, len(params), _PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=params[first:first + _PARAMS_PER_BATCH])
        self._remember(run_id)
        return run_id

    def _experiment(self) -> str:
        name = self._config.tracking.experiment or f"{self._config.data.corpus}-{self._config.model.label}"
        found = self._client.get_experiment_by_name(name)
        if found is None:
            artifacts = Path(self._config.output_dir).absolute() / "mlartifacts"
            local = self._uri.startswith("sqlite:")  # a server decides for itself where artifacts go
            return str(self._client.create_experiment(name, artifact_location=artifacts.as_uri() if local else None))
        if found.lifecycle_stage == "deleted":
            raise ValueError(f"the experiment {name} was deleted there; restore it or set tracking.experiment")
        return str(found.experiment_id)

    def _worker_run(self, worker: int) -> str:
        """The child run of a worker slot; a replaced worker process goes on in the same one."""
        if worker not in self._worker_runs:
            tags = {"mlflow.parentRunId": self.run_id, **_origin(worker)}
            run = self._client.create_run(self.experiment_id, tags=tags, run_name=f"worker {worker}")
            self._worker_runs[worker] = str(run.info.run_id)
            self._remember(self.run_id)
        return self._worker_runs[worker]

    def _remember(self, run_id: str) -> None:
        """Whole or not at all: a resumed run reads it."""
        stored = {"tracking_uri": self._uri, "experiment_id": self.experiment_id, "run_id": run_id,
                  "worker_runs": self._worker_runs}
        write_text(self.run_dir / "tracking.json", json.dumps(stored, indent=1))


def read_tracking(run_dir: Path) -> dict[str, Any]:
    """Where a run is in MLflow; empty if it never was there."""
    try:
        stored = json.loads((run_dir / "tracking.json").read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) and stored.keys() >= {"experiment_id", "run_id", "worker_runs"} else {}


def run_metrics(record: OuterIterationRecord) -> dict[str, float]:
    """The figures of one outer iteration; the part before the slash is MLflow's chart section."""
    return {
        "train/objf": record.train.objf, "train/frame_accuracy": record.train.accuracy,
        "train/running_objf": record.objf,
        "valid/objf": record.valid.objf, "valid/frame_accuracy": record.valid.accuracy,
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
        **{f"diagnostics/{name}": value for name, value in record.diagnostics.items()},
        **{f"natural_gradient/{name}": value for name, value in record.health.items()},
    }


def worker_metrics(jobs: list[JobRecord]) -> dict[str, float]:
    """One worker's share of one outer iteration; the same names in every child run, so that charts overlay workers."""
    num_frames = max(sum(job.num_frames for job in jobs), 1)
    seconds = sum(job.seconds for job in jobs)

    def mean(values: Iterable[float]) -> float:
        return sum(value * job.num_frames for value, job in zip(values, jobs, strict=True)) / num_frames

    return {
        "job/objf": mean(job.objf for job in jobs), "job/frame_accuracy": mean(job.accuracy for job in jobs),
        "job/seconds": seconds, "job/frames_per_second": num_frames / max(seconds, 1e-9),
        "job/max_change_share": mean(job.max_change_share for job in jobs),
    }


def _make_client(uri: str) -> Any:
    """Imports MLflow (1 to 2 s) without its greetings."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is down must not hold up the end
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells how it makes its tables otherwise
    return MlflowClient(tracking_uri=uri)


def _storable(value: float) -> float:
    """MLflow stores infinity as 1.8e308, which flattens every chart; not-a-number leaves a gap, as it should."""
    return float(value) if math.isfinite(value) else math.nan


def _percent(wer: str) -> float:
    """The figure in `%WER 3.10 [ ... ]`."""
    found = re.search(r"%WER\s+([0-9.]+)", wer)
    return float(found[1]) if found else math.nan


def _versions() -> dict[str, str]:
    from launcher.console import version

    tags = {f"version.{package}": version(package) for package in ("ngsgd", "torch", "ray")}
    source = Path(__file__).parent
    commit = _git(source, "rev-parse", "HEAD")
    return tags | ({"mlflow.source.git.commit": commit,
                    "git.dirty": str(bool(_git(source, "status", "--porcelain"))).lower()} if commit else {})


def _git(folder: Path, *arguments: str) -> str:
    """What git says, or nothing when this is no checkout or git is missing."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""


def _origin(index: int) -> dict[str, str]:
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = "unknown"
    return {"mlflow.source.name": "ngsgd train", "mlflow.source.type": "LOCAL", "mlflow.user": user,
            "mlflow.runColor": _COLOURS[index % len(_COLOURS)]}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
