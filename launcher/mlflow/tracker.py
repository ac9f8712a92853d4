"""A run in MLflow: settings, curves over frames processed, files and the final model.

MLflow may be slow (a fresh SQLite schema takes 8 s) or down: all requests come from one background
thread, and no error of them reaches training.
"""

from __future__ import annotations

import json
import math
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.files import read_json, unsealed, write_text
from ngsgd.launcher.console import version
from ngsgd.launcher.mlflow import store
from ngsgd.launcher.mlflow.metrics import Figures, MachineLoad, of_machines, records_of, settings_of, storable
from ngsgd.launcher.mlflow.store import Say
from ngsgd.masking import masked
from ngsgd.phase import Phase
from ngsgd.runs.run_folder import RunFolder, resume_command
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord

# saving the final model takes some 5 of them
CLOSE_TIMEOUT_S = 30.0
# between two tries while the store is down
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
# how soon a pause notices that the run ends
_LOOK_S = 0.1
# characters of an error message of MLflow
_LONGEST_REASON = 160
# characters of a tag and of a digest, MLflow's limits
_LONGEST_TAG = 8000
_LONGEST_DIGEST = 36
_PARAMS_PER_BATCH = 100          # MLflow's limits
_METRICS_PER_BATCH = 1000
# colons are allowed too, but not in file names
_BAD_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. /]")

# MLflow's default colors of two runs may be two shades of one color
_COLORS = ("#1f6fb4", "#e07b1a", "#2f8f4e", "#c0392b", "#7d4fb0", "#8c6d31", "#17a2b8", "#d6499e")
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "INVALID_STATE")


class MlflowTracker:
    """Sends a run's records to MLflow; a run folder with a tracking.json continues the run there.

    Failed requests are queued and retried, with growing pauses, until the run ends. The remaining
    ones are sent when the run is resumed, from the event log in the run folder.
    """

    def __init__(self, config: RunConfig, run_dir: Path, warn: Say, report: Say = lambda _line: None, *,
                 make_client: Callable[[str], Any] | None = None) -> None:
        self._run = _MlflowRun(config, run_dir.absolute(), make_client or store.open_client, warn)
        self._warn, self._report = warn, report
        # requests that the store refused, or that were left at the end
        self._num_lost = 0
        self._is_down = False
        self._deadline = math.inf
        self._load = MachineLoad(run_dir)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # opens the run at once, while data and workers get ready
        self._work.put(self._load.start)
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
        at_ms = int(time.time() * 1000)
        load = self._load.taken()
        self._work.put(lambda: self._run.log_outer_iteration(record, at_ms, load))

    def incident(self, incident: Incident) -> None:
        self._work.put(self._run.figures.count_incident)

    def finished(self, report: FinalReport) -> None:
        at_ms = int(time.time() * 1000)
        self._work.put(lambda: self._run.log_result(report, at_ms))

    def close(self, status: str) -> None:
        """Wait until everything is sent, for at most CLOSE_TIMEOUT_S."""
        self._report(Phase("sending the last updates and the model to MLflow"))
        self._load.close()
        self._deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._work.put(lambda: self._run.end(status))
        self._work.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        folder = self._run.run_dir
        resume = resume_command(self._run.task, folder)
        if self._thread.is_alive():
            self._warn(f"MLflow did not answer within {CLOSE_TIMEOUT_S:.0f} s; the run may be "
                       f"incomplete there, events.jsonl in {folder} has everything, and {resume} sends it.")
        elif self._num_lost:
            self._warn(f"{counted(self._num_lost, 'update')} did not reach MLflow; events.jsonl in "
                       f"{folder} has them, and {resume} sends them.")

    def _serve(self) -> None:
        for action in iter(self._work.get, None):
            self._send(action)

    def _send(self, action: Callable[[], None]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._run.open()
                action()
            except Exception as error:
                # whatever it is, training must continue
                if not self._is_down:
                    self._warn(f"MLflow cannot be written ({_first_line(error)}); training "
                               "continues, updates are sent later, and events.jsonl in "
                               f"{self._run.run_dir} has everything.")
                self._is_down = True
                # the store rejects this request, now and later; or the run ends
                if getattr(error, "error_code", "") in _REFUSALS or not self._rest(pause_s):
                    self._num_lost += 1
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
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
        self._config = config
        self._make_client = make_client
        self._warn = warn
        self._artifacts: store.Artifacts | None = None
        self._client: Any = None
        self._uri = store.tracking_uri(config)
        # the Python program that opened the run ends it
        self._is_of_program = bool(config.tracking.run_id) and config.tracking.run_id == store.active_run_id()
        # names of tags that the run had before
        self._foreign_tags: set[str] = set()
        self._model_id, self._is_registered = "", True
        # the scores of the final model, and when they were measured
        self._result: tuple[Mapping[str, float], int] = {}, 0
        self.figures = Figures(config)
        # the newest outer iteration that the store has
        self._sent = -1
        # of the processes that trained before this one
        self._past = records_of(run_dir)

    def open(self) -> None:
        if self.run_id:
            return
        self._client = self._client or self._make_client(self._uri)
        run_id = self._continued() or self._created()
        if self._artifacts is None or self._artifacts.run_id != run_id:
            artifacts = store.Artifacts(self._client, run_id, self._uri)
            if artifacts.refused is not None and self._artifacts is None:
                self._warn(f"the MLflow server names {artifacts.refused[:_LONGEST_REASON]!r} for "
                           "this run's files, which is no remote store, so no file is written "
                           "there; metrics are sent all the same. Start the server with "
                           "--artifacts-destination, without --no-serve-artifacts.")
            self._artifacts = artifacts
        self._artifacts.log(self.run_dir / "config.yaml")
        # what a process before this one could not send
        for at_ms, record in self._past:
            if record.outer_iter > self._sent:
                self.log_outer_iteration(record, at_ms, {}, run_id)
            else:
                self.figures.count(record)
        # last: had anything above failed, the next try does it again
        self.run_id = run_id

    def log_outer_iteration(self, record: OuterIterationRecord, at_ms: int, load: Mapping[str, float], run_id: str = "") -> None:
        run_id = run_id or self.run_id
        self._log(run_id, {**self.figures.of(record), **of_machines(record.jobs), **load}, at_ms)
        # last: had a request failed, all of this is done again
        self.figures.count(record)
        self._sent = record.outer_iter
        self._remember(run_id)

    def log_result(self, report: FinalReport, at_ms: int) -> None:
        result = self.figures.of_result(report)
        if report.test_errors and report.valid_errors:
            self._set_tag("mlflow.note.content", f"test: {report.test_errors}\n\nvalid: {report.valid_errors}")
        self._log(self.run_id, result, at_ms)
        self._result = result, at_ms

    def _set_tag(self, name: str, value: str) -> None:
        if name not in self._foreign_tags:
            self._client.set_tag(self.run_id, name, value)

    def end(self, status: str) -> None:
        """Send the files, which are complete now, and the model; set how the run ended."""
        assert self._artifacts
        error = RunFolder(self.run_dir).last_error()
        if error:
            self._set_tag("exit_code", str(error["exit_code"]))
            self._set_tag("error", error["message"][:_LONGEST_TAG])
        elif status == "FINISHED":
            # of an earlier process of this run
            for name in {"exit_code", "error"} & set(self._client.get_run(self.run_id).data.tags) - self._foreign_tags:
                self._client.delete_tag(self.run_id, name)
        for name in ("events.jsonl", "learning_curve.png", "ledger.jsonl", "final", "decode"):
            if (self.run_dir / name).exists():
                self._artifacts.log(self.run_dir / name)
        # a registered model would name a place where no model is
        has_model = (self.figures.is_speech and self._artifacts.refused is None
                     and (self.run_dir / "final" / "model.json").is_file())
        if status == "FINISHED" and has_model:
            self._log_model(self._artifacts)
        if not self._is_of_program:
            self._client.set_terminated(self.run_id, status)

    def _log_model(self, artifacts: store.Artifacts) -> None:
        """Once for each run, even if it is resumed after its end."""
        if not self._model_id:
            # imports speech recognition
            from ngsgd.asr.bundle import INDEX
            final = self.run_dir / "final"
            takes_audio = self._config.features.kind != "given" and (final / INDEX).is_file()
            self._model_id = store.log_model(self._client, self.run_id, self.experiment_id, final, artifacts, uri=self._uri,
                                             step=self.figures.step, takes_audio=takes_audio)
            self._is_registered = False
            self._remember(self.run_id)
            scores = {name: value for name, value in self._result[0].items() if not name.startswith("time/")}
            self._log(self.run_id, scores, self._result[1], model_id=self._model_id)
        name = self._config.tracking.registered_model_name
        if name and self._model_id and not self._is_registered:
            number = store.register_model(self._client, self.run_id, self._model_id, name)
            self._set_tag("registered_as", f"{name} version {number}")
        self._is_registered = True

    def _log(self, run_id: str, figures: Mapping[str, float], at_ms: int, *, model_id: str = "") -> None:
        """One request for all figures (a thousand at most), at the current number of frames."""
        from mlflow.entities import Metric
        metrics = [Metric(_BAD_IN_NAMES.sub("_", name), storable(value), at_ms, self.figures.step, model_id or None)
                   for name, value in figures.items()]
        for first in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=metrics[first:first + _METRICS_PER_BATCH])

    def _continued(self) -> str:
        """The run of the folder, set running again; empty where this store has none."""
        stored = store.read_tracking(self.run_dir)
        if store.without_login(str(stored.get("tracking_uri"))) != store.without_login(self._uri):
            return ""
        try:
            self._client.update_run(stored["run_id"], status="RUNNING")
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            # the store was emptied meanwhile: the rest of the run goes to a new one
            return ""
        self.experiment_id = str(stored["experiment_id"])
        self._sent, self._model_id = int(stored["sent"]), str(stored["model_id"])
        return str(stored["run_id"])

    def _created(self) -> str:
        """The run of the settings, or a new one, with parameters, tags and data set."""
        from mlflow.entities import Param, RunTag
        # in another store, or in one that was emptied
        before = store.read_tracking(self.run_dir)
        num_runs = len(list(self.run_dir.parent.glob("*/tracking.json")))
        tags = _versions() | ({"resumed_from": str(before["run_id"])} if before else {})
        params = {name: value or "''" for name, value in settings_of(self._config).items()}
        run_id = self._config.tracking.run_id
        if run_id and run_id != before.get("run_id"):
            run = self._client.get_run(run_id)
            self.experiment_id, self._foreign_tags = str(run.info.experiment_id), set(run.data.tags)
            tags = {name: value for name, value in tags.items() if name not in self._foreign_tags}
            # MLflow refuses to change a parameter
            if kept := sorted(name for name, value in run.data.params.items() if params.pop(name, value) != value):
                self._warn(f"the MLflow run {run_id} has other values of {', '.join(kept)}, which stay as they are there")
            self._client.update_run(run_id, status="RUNNING")
            self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        else:
            self.experiment_id = store.experiment_id(self._client, self._config)
            parent = self._config.tracking.parent_run_id
            tags |= _origin(num_runs) | ({"mlflow.parentRunId": parent} if parent else {})
            run_id = str(self._client.create_run(self.experiment_id, tags=tags, run_name=self.run_dir.name).info.run_id)
        # only here: a resumed run has the same ones anyway
        rest = [Param(name, value) for name, value in params.items()]
        for first in range(0, len(rest), _PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=rest[first:first + _PARAMS_PER_BATCH])
        self._remember(run_id)
        self._log_data(run_id)
        return run_id

    def _log_data(self, run_id: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag
        try:
            about = unsealed("prepared data", read_json(RunFolder(self.run_dir).data))
            digest, source = str(about["digest"]), str(about["egs"])
        except (OSError, ValueError, KeyError):
            # a custom task has no prepared data that could be named
            return
        data = Dataset(self._config.data.corpus, digest[:_LONGEST_DIGEST], "local", json.dumps({"uri": source}))
        self._client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])

    def _remember(self, run_id: str) -> None:
        """Write tracking.json, which a resumed run reads, in one step."""
        stored = {"tracking_uri": masked(self._uri, known=False), "experiment_id": self.experiment_id, "run_id": run_id,
                  "sent": self._sent, "model_id": self._model_id}
        write_text(self.run_dir / "tracking.json", json.dumps(stored, indent=1))


def _first_line(error: Exception) -> str:
    # SQLAlchemy's advice on its sessions comes before the reason
    lines = (line.strip() for line in str(error).splitlines() if not line.startswith("(raised as a result of"))
    line = next(filter(None, lines), type(error).__name__)
    line = masked(line)
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."


def _versions() -> dict[str, str]:
    tags = {f"version.{package}": version(package) for package in ("ngsgd", "torch", "ray")}
    source = Path(__file__).parent
    if commit := _git(source, "rev-parse", "HEAD"):
        tags |= {"mlflow.source.git.commit": commit, "git.dirty": str(bool(_git(source, "status", "--porcelain"))).lower()}
    return tags


def _git(folder: Path, *arguments: str) -> str:
    """The output of a git command; empty outside a checkout or without git."""
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True,
                              text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _origin(index: int) -> dict[str, str]:
    """The tags that MLflow itself would set; `index` chooses the color."""
    import getpass
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # a container without a name for its user
        user = "unknown"
    return {"mlflow.source.name": "ngsgd train", "mlflow.source.type": "LOCAL", "mlflow.user": user,
            "mlflow.runColor": _COLORS[index % len(_COLORS)]}
