"""A run in MLflow: settings, curves over frames processed, nested runs of workers if asked for,
files and the final model.

MLflow may be slow (a fresh SQLite schema takes 8 s) or down. All requests come from one background
thread, and no error of them reaches training: failed requests are retried, and the event log in the
run folder is complete.
"""

from __future__ import annotations

import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig
from ngsgd.config.build import flatten
from ngsgd.config.unused import of_speech
from ngsgd.files import read_json, unsealed, write_text
from ngsgd.launcher.machine_load import load_of_machine
from ngsgd.launcher.mlflow.metrics import SystemMetrics, run_metrics, storable, worker_metrics
from ngsgd.launcher.mlflow.store import (
    Artifacts,
    log_dataset,
    log_model,
    open_client,
    read_tracking,
    register_model,
    tracking_uri,
    without_login,
)
from ngsgd.launcher.mlflow.tables import WorkerTable, layer_csv
from ngsgd.launcher.mlflow.tags import origin, versions
from ngsgd.launcher.reports.efficiency import of_record
from ngsgd.launcher.text import masked
from ngsgd.object_storage.urls import local_root
from ngsgd.phase import Phase
from ngsgd.runs.run_folder import RunFolder, resume_command, what_is_trained
from ngsgd.training.records import FinalReport, Incident, JobRecord, OuterIterationRecord
from ngsgd.training.storage.event_log import events_of

# saving the final model takes some 5 of them
CLOSE_TIMEOUT_S = 30.0
# between two tries while the store is down
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
# how soon a pause notices that the run ends
_LOOK_S = 0.1
# each costs one request per outer iteration; more lines in a chart nobody can read
_MAX_WORKER_RUNS = 32
# characters of an error message of MLflow
_LONGEST_REASON = 160
# characters of a tag, MLflow's limit
_LONGEST_TAG = 8000
_PARAMS_PER_BATCH = 100          # MLflow's limits
_METRICS_PER_BATCH = 1000
# colons are allowed too, but not in file names
_BAD_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. /]")

_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "INVALID_STATE")

Say = Callable[[str], None]


class MlflowTracker:
    """Sends a run's records to MLflow; a run folder that already has a tracking.json continues the
    run named there.

    Failed requests are queued and retried, with growing pauses, until the run ends. The remaining
    ones are sent when the run is resumed, from the event log in the run folder.
    """

    def __init__(self, config: RunConfig, run_dir: Path, warn: Say, report: Say = lambda _line: None, *,
                 make_client: Callable[[str], Any] | None = None) -> None:
        self._run = _MlflowRun(config, run_dir.absolute(), make_client or open_client, warn)
        self._warn, self._report = warn, report
        self._num_refused = 0
        self._num_unsent = 0
        self._is_down = False
        self._deadline = math.inf
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # opens the run at once, while data and workers get ready
        self._work.put(lambda: None)
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
        # now, and not when it is sent: a metric that is sent twice is then stored once
        at_ms = _now_ms()
        load = load_of_machine(self._run.run_dir) if self._run.has_system else {}
        self._work.put(lambda: self._run.log_outer_iteration(record, at_ms, load))

    def incident(self, incident: Incident) -> None:
        self._work.put(self._run.count_incident)

    def finished(self, report: FinalReport) -> None:
        at_ms = _now_ms()
        self._work.put(lambda: self._run.log_result(report, at_ms))

    def close(self, status: str) -> None:
        """Wait until everything is sent, for at most CLOSE_TIMEOUT_S."""
        self._report(Phase("sending the last updates and the model to MLflow"))
        self._deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._work.put(lambda: self._run.end(status))
        self._work.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        folder = self._run.run_dir
        resume = resume_command(self._run.task, folder)
        if self._thread.is_alive():
            self._warn(f"MLflow did not answer within {CLOSE_TIMEOUT_S:.0f} s; the run may be incomplete there, events.jsonl in "
                       f"{folder} has everything, and {resume} sends it.")
        elif self._num_refused + self._num_unsent:
            self._warn(f"{self._num_refused + self._num_unsent} updates did not reach MLflow; events.jsonl in {folder} has them, "
                       f"and {resume} sends them.")

    def _serve(self) -> None:
        while (action := self._work.get()) is not None:
            self._send(action)

    def _send(self, action: Callable[[], None]) -> None:
        """Send a request; retry it while the store is down."""
        for pause_s in _pauses():
            try:
                self._run.open()
                action()
            except Exception as error:
                # whatever it is, training must continue
                if not self._is_down:
                    self._warn(f"MLflow cannot be written ({_first_line(error)}); training continues, updates are sent later, "
                               f"and events.jsonl in {self._run.run_dir} has everything.")
                self._is_down = True
                # the store rejects this request, now and later
                if getattr(error, "error_code", "") in _REFUSALS:
                    self._num_refused += 1
                    return
                if not self._rest(pause_s):
                    self._num_unsent += 1
                    return
            else:
                self._is_down = False
                return

    def _rest(self, pause_s: float) -> bool:
        """Sleep before the next retry; False if the run ends before it."""
        ends = time.monotonic() + pause_s
        while time.monotonic() < ends:
            if self._deadline < math.inf and ends > self._deadline:
                return False
            time.sleep(min(_LOOK_S, max(0.0, ends - time.monotonic())))
        return True


class _MlflowRun:
    """All requests of a run to MLflow; used in the background thread only."""

    def __init__(self, config: RunConfig, run_dir: Path, make_client: Callable[[str], Any], warn: Say) -> None:
        self.run_dir = run_dir
        self.task = config.task
        self.run_id = ""
        self.experiment_id = ""
        self.has_system = config.tracking.log_system_metrics
        self._config = config
        self._is_speech = not self._config.task._target_
        self._make_client = make_client
        self._warn = warn
        self._artifacts: Artifacts | None = None
        self._client: Any = None
        self._uri = tracking_uri(config)
        self._worker_runs: dict[int, str] = {}
        self._num_incidents = 0
        self._elapsed_s = 0.0
        # of training so far, by cluster.price_per_hour
        self._cost = 0.0
        self._model_id, self._is_registered = "", True
        # metrics that have not been zero all the time
        self._shown: set[str] = set()
        # the scores of the final model, and when they were measured
        self._result: tuple[Mapping[str, float], int] = {}, 0
        self._workers, self._system = WorkerTable(), SystemMetrics()
        self._latest: OuterIterationRecord | None = None
        self._frames_processed = 0
        # the newest outer iteration that the store has
        self._sent = -1
        # of the processes that trained before this one
        self._past = _records(run_dir)

    def open(self) -> None:
        """Find or create the run, once."""
        if self.run_id:
            return
        self._client = self._client or self._make_client(self._uri)
        run_id = self._continued() or self._created()
        self._artifacts = self._artifacts_of(run_id)
        self._artifacts.log_file(self.run_dir / "config.yaml")
        # what a process before this one could not send
        for at_ms, record in self._past:
            if record.outer_iter > self._sent:
                self._log_outer_iteration(run_id, record, at_ms, {})
            else:
                self._count(record)
        # last: had anything above failed, the next try does it again
        self.run_id = run_id

    def _artifacts_of(self, run_id: str) -> Artifacts:
        if self._artifacts is not None and self._artifacts.run_id == run_id:
            return self._artifacts
        artifacts = Artifacts(self._client, run_id, self._uri)
        if artifacts.refused is not None and self._artifacts is None:
            self._warn(f"the MLflow server names {artifacts.refused[:_LONGEST_REASON]!r} for this run's files, which is no remote "
                       "store, so no file is written there; metrics are sent all the same. Start the server with "
                       "--artifacts-destination, without --no-serve-artifacts.")
        return artifacts

    def log_outer_iteration(self, record: OuterIterationRecord, at_ms: int, load: Mapping[str, float]) -> None:
        self._log_outer_iteration(self.run_id, record, at_ms, load)

    def _log_outer_iteration(self, run_id: str, record: OuterIterationRecord, at_ms: int, load: Mapping[str, float]) -> None:
        self._frames_processed = record.frames_processed
        figures = run_metrics(record, is_speech=self._is_speech, before_s=self._elapsed_s)
        figures["workers/incidents"] = self._num_incidents
        figures["workers/cost"] = self._cost + self._cost_of(record)
        if self._config.tracking.nested_runs:
            # the mean over the workers, whose own charts have the same names
            figures |= worker_metrics([job for job in record.jobs if job.accepted], is_speech=self._is_speech)
        if self.has_system:
            figures |= self._system.of(load, record.jobs, at_ms / 1000)
        # a chart that is always zero has no information
        self._shown |= {name for name, value in figures.items() if value}
        self._log(run_id, {name: value for name, value in figures.items() if name in self._shown}, at_ms)
        by_worker: dict[int, list[JobRecord]] = {}
        for job in record.jobs:
            if self._config.tracking.nested_runs and job.accepted and 0 <= job.worker < _MAX_WORKER_RUNS:
                by_worker.setdefault(job.worker, []).append(job)
        for worker, jobs in sorted(by_worker.items()):
            self._log(self._worker_run(run_id, worker), worker_metrics(jobs, is_speech=self._is_speech), at_ms)
        # last: had a request failed, all of this is done again
        self._count(record)
        self._sent = record.outer_iter
        self._remember(run_id)

    def _cost_of(self, record: OuterIterationRecord) -> float:
        return of_record(record, self._elapsed_s).cost(self._config.cluster.price_per_hour)

    def _count(self, record: OuterIterationRecord) -> None:
        self._workers.add(record)
        self._cost += self._cost_of(record)
        self._latest, self._elapsed_s, self._frames_processed = record, record.elapsed_s, record.frames_processed

    def count_incident(self) -> None:
        """Chart it with the next outer iteration; the messages are in events.jsonl."""
        self._num_incidents += 1

    def log_result(self, report: FinalReport, at_ms: int) -> None:
        self._frames_processed = report.frames_processed
        result = {"time/total_s": report.seconds}
        if report.test_errors and report.valid_errors:
            result |= {"2_wer/test": report.test_errors.wer, "2_wer/valid": report.valid_errors.wer,
                       "result/objf_valid": report.valid.objf, "result/accuracy_valid": report.valid.accuracy}
            self._client.set_tag(self.run_id, "mlflow.note.content", f"test: {report.test_errors}\n\nvalid: {report.valid_errors}")
        result |= {f"result/{name.replace('/', '_')}": value for name, value in report.metrics.items()}
        self._log(self.run_id, result, at_ms)
        self._result = result, at_ms

    def end(self, status: str) -> None:
        """Send the files, which are complete now, and the model; set how the run ended."""
        assert self._artifacts
        error = RunFolder(self.run_dir).last_error()
        if error:
            self._client.set_tag(self.run_id, "exit_code", str(error["exit_code"]))
            self._client.set_tag(self.run_id, "error", error["message"][:_LONGEST_TAG])
        unit = "frames" if self._is_speech else "examples"
        tables = {"workers.csv": self._workers.csv(unit), "layers.csv": layer_csv(self._latest) if self._latest else ""}
        for name, text in tables.items():
            if text:
                self._artifacts.log_text(text, name)
        for name in ("events.jsonl", "learning_curve.png", "ledger.jsonl"):
            if (self.run_dir / name).is_file():
                self._artifacts.log_file(self.run_dir / name)
        for folder in ("final", "decode"):
            if (self.run_dir / folder).is_dir():
                self._artifacts.log_folder(self.run_dir / folder, folder)
        # a registered model would name a place where no model is
        has_model = self._is_speech and self._artifacts.refused is None and (self.run_dir / "final" / "model.json").is_file()
        if status == "FINISHED" and self._config.tracking.log_model and has_model:
            self._log_model(self._artifacts)
        for run_id in (*self._worker_runs.values(), self.run_id):
            self._client.set_terminated(run_id, status)

    def _log_model(self, artifacts: Artifacts) -> None:
        """Once for each run, even if it is resumed after its end."""
        if not self._model_id:
            self._model_id = log_model(self._client, self.run_id, self.experiment_id, self.run_dir / "final", artifacts,
                                       uri=self._uri, step=self._frames_processed)
            self._is_registered = False
            self._remember(self.run_id)
            scores = {name: value for name, value in self._result[0].items() if not name.startswith("time/")}
            self._log(self.run_id, scores, self._result[1], model_id=self._model_id)
        name = self._config.tracking.registered_model_name
        if name and self._model_id and not self._is_registered:
            version = register_model(self._client, self.run_id, self._model_id, name)
            self._client.set_tag(self.run_id, "registered_as", f"{name} version {version}")
        self._is_registered = True

    def _log_dataset(self, run_id: str) -> None:
        """The prepared data of a speech recipe; a custom task has none that could be named."""
        try:
            about = unsealed("prepared data", read_json(RunFolder(self.run_dir).data))
            digest, source = str(about["digest"]), str(about["egs"])
        except (OSError, ValueError, KeyError):
            return
        log_dataset(self._client, run_id, self._config.data.corpus, digest, source)

    def _log(self, run_id: str, figures: Mapping[str, float], at_ms: int, *, model_id: str = "") -> None:
        """One request for all figures (a thousand at most), at the current number of frames."""
        from mlflow.entities import Metric

        metrics = [Metric(_BAD_IN_NAMES.sub("_", name), storable(value), at_ms, self._frames_processed, model_id or None)
                   for name, value in figures.items()]
        for first in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=metrics[first:first + _METRICS_PER_BATCH])

    def _continued(self) -> str:
        """The run that the folder belongs to, set running again; empty when there is none in this
        store.
        """
        stored = read_tracking(self.run_dir)
        if without_login(str(stored.get("tracking_uri"))) != without_login(self._uri):
            return ""
        worker_runs = {int(worker): str(run) for worker, run in stored["worker_runs"].items()}
        try:
            for run in (stored["run_id"], *worker_runs.values()):
                self._client.update_run(run, status="RUNNING")
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            # the store was emptied meanwhile: the rest of the run goes to a new one
            return ""
        self.experiment_id, self._worker_runs = str(stored["experiment_id"]), worker_runs
        self._sent, self._model_id = int(stored["sent"]), str(stored["model_id"])
        return str(stored["run_id"])

    def _created(self) -> str:
        from mlflow.entities import Param

        self.experiment_id = self._experiment()
        num_runs = len(list(self.run_dir.parent.glob("*/tracking.json")))
        # in another store, or in one that was emptied
        before = read_tracking(self.run_dir)
        tags = {**origin(num_runs), **versions(), **({"resumed_from": str(before["run_id"])} if before else {})}
        run_id = str(self._client.create_run(self.experiment_id, tags=tags, run_name=self.run_dir.name).info.run_id)
        # only here: MLflow refuses to change a parameter, and a resumed run has the same ones
        # anyway
        params = [Param(name, masked(str(value)) or "''") for name, value in flatten(self._config).items()
                  if self._is_speech or not of_speech(name)]
        for first in range(0, len(params), _PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=params[first:first + _PARAMS_PER_BATCH])
        self._remember(run_id)
        self._log_dataset(run_id)
        return run_id

    def _experiment(self) -> str:
        name = self._config.tracking.experiment_name or what_is_trained(self._config)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            artifacts = local_root(self._config.output_dir).absolute() / "mlartifacts"
            # a server decides for itself where artifacts go
            local = self._uri.startswith("sqlite:")
            return str(self._client.create_experiment(name, artifact_location=artifacts.as_uri() if local else None))
        if found.lifecycle_stage == "deleted":
            raise ValueError(f"the experiment {name} was deleted there; restore it or set tracking.experiment_name")
        return str(found.experiment_id)

    def _worker_run(self, run_id: str, worker: int) -> str:
        """The nested run of a worker slot; it stays the same when the worker process is replaced.
        """
        if worker not in self._worker_runs:
            tags = {"mlflow.parentRunId": run_id, **origin(worker)}
            run = self._client.create_run(self.experiment_id, tags=tags, run_name=f"worker {worker}")
            self._worker_runs[worker] = str(run.info.run_id)
            self._remember(run_id)
        return self._worker_runs[worker]

    def _remember(self, run_id: str) -> None:
        """Write tracking.json, which a resumed run reads, in one step."""
        stored = {"tracking_uri": masked(self._uri, known=False), "experiment_id": self.experiment_id, "run_id": run_id,
                  "worker_runs": self._worker_runs, "sent": self._sent, "model_id": self._model_id}
        write_text(self.run_dir / "tracking.json", json.dumps(stored, indent=1))


def _records(run_dir: Path) -> list[tuple[int, OuterIterationRecord]]:
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


def _pauses() -> Iterator[float]:
    """Seconds before the second try, the third ..."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _now_ms() -> int:
    return int(time.time() * 1000)


def _first_line(error: Exception) -> str:
    # SQLAlchemy's advice on its sessions comes before the reason
    lines = (line.strip() for line in str(error).splitlines() if not line.startswith("(raised as a result of"))
    line = next(filter(None, lines), type(error).__name__)
    line = masked(line)
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."
