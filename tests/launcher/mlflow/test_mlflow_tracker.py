"""A run in MLflow: requests, that nothing of it can hurt training, and once for real in SQLite.
"""

from __future__ import annotations

import contextlib
import csv
import http.server
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngsgd.config import RunConfig
from ngsgd.errors import ClusterError
from ngsgd.launcher.config import compose
from ngsgd.launcher.mlflow import metrics
from ngsgd.launcher.mlflow import store as mlflow_store
from ngsgd.launcher.mlflow import tracker as mlflow_tracker
from ngsgd.launcher.mlflow.store import read_tracking
from ngsgd.launcher.mlflow.tables import WorkerTable
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.runs import config_file
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.records import Incident
from ngsgd.training.storage.event_log import EventLog
from tests.launcher.records import final_report, job, outer_iteration
from tests.tiers import HANGS_S

# a guard against hanging


class Client:
    """An MlflowClient that records its calls."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        # run name, name -> value, step
        self.metrics: list[tuple[str, dict[str, tuple[float, int]]]] = []
        self.params: dict[str, str] = {}
        self.artifacts: list[str] = []
        self.fails = False
        self.has_failed = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        return "7"

    def create_run(self, experiment_id: str, *, tags: dict[str, str], run_name: str) -> Any:
        run_id = f"id{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "tags": tags, "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def get_run(self, run_id: str) -> Any:
        # a folder of the server, which takes no files from another machine
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, artifact_uri="/srv/mlruns"))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert self.may_answer.wait(HANGS_S)
        if self.fails:
            self.has_failed.set()
            raise OSError("disk full\nmore")
        assert len(params) <= 100
        self.params |= {param.key: param.value for param in params}
        if metrics:
            self.metrics.append((self.runs[run_id]["name"], {m.key: (m.value, m.step) for m in metrics}))

    def log_artifact(self, run_id: str, path: str) -> None:
        self.artifacts.append(Path(path).name)

    def log_artifacts(self, run_id: str, path: str, where: str) -> None:
        self.artifacts.append(f"{where}/")

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id]["tags"][key] = value

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = compose.compose([f"output_dir={tmp_path}", "tracking.nested_runs=true", "tracking.log_system_metrics=false"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_file.to_yaml(config))
    (tmp_path / "run" / "events.jsonl").write_text("{}\n")
    return config


def start(config: RunConfig, make_client: Callable[[str], Any]) -> tuple[MlflowTracker, list[str]]:
    said: list[str] = []
    return MlflowTracker(config, Path(config.output_dir) / "run", said.append, make_client=make_client), said


def test_every_outer_iteration_is_one_batch_per_run_at_frames_processed(config: RunConfig) -> None:
    client = Client()
    tracker, said = start(config, lambda _: client)
    tracker.outer_iteration(outer_iteration(0))
    tracker.outer_iteration(outer_iteration(1))
    tracker.finished(final_report())
    tracker.close("FINISHED")
    assert said == []
    names = [name for name, _ in client.metrics]
    assert names == ["run", "worker 0", "worker 1"] * 2 + ["run"]
    first = client.metrics[0][1]
    assert first["1_objf/train"] == (-1.79, 32000) and first["3_accuracy/valid"] == (0.612, 32000)
    assert {"optimizer/lr", "optimizer/layer_updates_clipped", "time/compute_s", "time/checkpoint_s",
            "workers/jobs_accepted", "optimizer/relative_change_max"} <= first.keys()
    assert client.metrics[1][1].keys() == client.metrics[2][1].keys()
    assert client.metrics[-1][1]["2_wer/test"][0] == 3.1 and client.metrics[-1][1]["2_wer/valid"][0] == 2.8
    assert {run["status"] for run in client.runs.values()} == {"FINISHED"}
    assert client.runs["id1"]["tags"]["mlflow.parentRunId"] == tracker.run_id
    assert client.params["optimizer.max_change"] == str(config.optimizer.max_change)
    assert all(client.params.values()), "an empty parameter shows as a blank"
    assert {"config.yaml", "events.jsonl"} <= set(client.artifacts)


def test_a_worker_with_two_jobs_gives_one_point_weighted_by_frames(config: RunConfig) -> None:
    client = Client()
    tracker, _ = start(config, lambda _: client)
    jobs = (job(objf=-1.0), job(number=1, objf=-3.0), job(number=2, accepted=False))
    tracker.outer_iteration(outer_iteration(jobs=jobs))
    tracker.close("FINISHED")
    [figures] = [figures for name, figures in client.metrics if name == "worker 0"]
    assert figures["job/objf"][0] == -2.0
    assert figures["job/frames_per_second"][0] == 8000.0


def test_infinity_becomes_a_gap_and_bad_names_are_fixed(config: RunConfig) -> None:
    client = Client()
    tracker, said = start(config, lambda _: client)
    record = outer_iteration(valid_objf=-math.inf)
    record.diagnostics["block:0(x)"] = 0.5
    tracker.outer_iteration(record)
    tracker.close("FINISHED")
    assert said == []
    assert math.isnan(client.metrics[0][1]["1_objf/valid"][0])
    assert "task/block_0_x_" in client.metrics[0][1]


def test_incidents_are_charted(config: RunConfig) -> None:
    client = Client()
    tracker, _ = start(config, lambda _: client)
    tracker.incident(Incident("worker_died", "x", 0))
    tracker.outer_iteration(outer_iteration())
    tracker.close("FAILED")
    assert client.metrics[0][1]["workers/incidents"][0] == 1
    assert client.runs["id0"]["status"] == "FAILED"


def test_metrics_missed_by_an_unavailable_store_are_sent_later(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "FIRST_PAUSE_S", 0.01)
    client = Client()
    tracker, said = start(config, lambda _: client)
    while not tracker.run_id:
        time.sleep(0.01)
    client.fails = True
    # were training to wait for the store, the loop would not end
    client.may_answer.clear()
    for outer_iter in range(3):
        tracker.outer_iteration(outer_iteration(outer_iter))
    client.may_answer.set()
    assert client.has_failed.wait(HANGS_S)
    client.fails = False
    tracker.close("FINISHED")
    assert len(said) == 1 and said[0].startswith("MLflow cannot be written (disk full)")
    steps = [figures["1_objf/valid"][1] for name, figures in client.metrics if name == "run"]
    assert steps == [32000, 64000, 96000]


def test_unsent_metrics_are_counted_and_sent_by_the_resumed_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", 0.3)
    client, log = Client(), EventLog(Path(config.output_dir) / "run" / "events.jsonl")
    tracker, said = start(config, lambda _: client)
    for outer_iter in range(3):
        log.outer_iteration(outer_iteration(outer_iter))
        tracker.outer_iteration(outer_iteration(outer_iter))
        while outer_iter == 0 and read_tracking(Path(config.output_dir) / "run").get("sent") != 0:
            time.sleep(0.01)
        client.fails = True
    tracker.close("KILLED")
    assert said[-1].startswith("2 updates did not reach MLflow") or "answer" in said[-1], said
    # another client of the same store, since a thread of the first tracker may still try
    second = Client()
    second.runs, second.metrics = client.runs, client.metrics
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", 300.0)
    again, said = start(config, lambda _: second)
    again.outer_iteration(outer_iteration(3))
    again.close("FINISHED")
    steps = [figures["1_objf/valid"][1] for name, figures in client.metrics if name == "run"]
    assert steps == [32000, 64000, 96000, 128000] and said == []


def test_a_message_that_the_store_refuses_does_not_hold_up_the_others(config: RunConfig) -> None:
    class Refusing(Client):
        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            if any(point.step == 32000 for point in metrics):
                error = RuntimeError("no such name")
                error.error_code = "INVALID_PARAMETER_VALUE"  # type: ignore[attr-defined]
                raise error
            super().log_batch(run_id, metrics, params)

    client = Refusing()
    tracker, said = start(config, lambda _: client)
    tracker.outer_iteration(outer_iteration(0))
    tracker.outer_iteration(outer_iteration(1))
    tracker.close("FINISHED")
    assert [figures["1_objf/valid"][1] for name, figures in client.metrics if name == "run"] == [64000]
    assert said[-1].startswith("1 updates did not reach MLflow")


def test_an_emptied_store_gets_the_complete_run_again_tagged(config: RunConfig) -> None:
    folder = Path(config.output_dir) / "run"
    EventLog(folder / "events.jsonl").outer_iteration(outer_iteration(0))
    (folder / "tracking.json").write_text(json.dumps(
        {"tracking_uri": "elsewhere", "experiment_id": "1", "run_id": "old", "worker_runs": {}, "sent": 0}))
    client = Client()
    tracker, _ = start(config, lambda _: client)
    tracker.close("FINISHED")
    assert client.runs["id0"]["tags"]["resumed_from"] == "old"
    assert client.metrics[0][1]["1_objf/valid"] == (-1.92, 32000)


def test_workers_have_runs_of_their_own_only_when_asked(config: RunConfig) -> None:
    client = Client()
    quiet = replace(config, tracking=replace(config.tracking, nested_runs=False, log_system_metrics=True))
    tracker, _ = start(quiet, lambda _: client)
    tracker.outer_iteration(outer_iteration(0))
    tracker.close("FINISHED")
    [(name, figures)] = client.metrics
    assert name == "run" and figures["system/memory_used_gb"][0] > 0.0


def test_every_machine_has_a_separate_load_section_and_batches_stay_within_the_limit(config: RunConfig) -> None:
    client = Client()
    tracking = replace(config.tracking, nested_runs=False, log_system_metrics=True)
    tracker, _ = start(replace(config, tracking=tracking), lambda _: client)
    away = tuple(replace(job(number=number, worker=number), host=f"n{number % 40:02}",
                         machine={f"figure{index}": 100.0 * number + index for index in range(50)}) for number in range(41))
    tracker.outer_iteration(outer_iteration(0, jobs=(job(), *away)))
    tracker.close("FINISHED")
    assert len(client.metrics) == 2 and all(len(figures) <= 1000 for _, figures in client.metrics)
    sent = {name: value for _, figures in client.metrics for name, (value, _) in figures.items()}
    assert sent["system/cpu_percent"] >= 0.0, "the coordinator's own"
    assert sent["system/n01/figure3"] == 103.0 and sent["system/n00/figure0"] == 4000.0, "the last job of a machine tells"
    assert len({name.split("/")[1] for name in sent if name.startswith("system/n") and name.count("/") == 2}) == 32


def test_the_scores_come_first_and_no_metric_is_always_zero(config: RunConfig) -> None:
    client = Client()
    plain = replace(config, tracking=replace(config.tracking, nested_runs=False, log_system_metrics=True))
    tracker, _ = start(plain, lambda _: client)
    layers = {f"affine{number}": 0.1 for number in range(20)}
    health = {f"{layer}/{figure}": 0.5 for layer in layers
              for figure in ("limited", "cosine", "input_last_e", "input_effective_rank", "output_last_e", "output_effective_rank")}
    jobs = tuple(replace(job(number=number, worker=number), health=health) for number in range(4))
    record = replace(outer_iteration(0, jobs=jobs), relative_change={**layers, "output.weight": 8e10})
    tracker.outer_iteration(record)
    tracker.close("FINISHED")
    [(_, figures)] = client.metrics
    assert sorted(figures)[:2] == ["1_objf/train", "1_objf/valid"] and len(figures) <= 40
    assert figures["optimizer/relative_change_max"][0] == 0.1, "a parameter that was zero has no relative change"
    assert not {"workers/deaths", "workers/jobs_deferred", "workers/results_discarded", "workers/incidents"} & figures.keys()


def test_counters_of_the_network_become_rates(config: RunConfig) -> None:
    system = metrics.SystemMetrics()
    system.of({"network_sent_mb": 400.0, "cpu_percent": 5.0}, [], 10.0)
    assert system.of({"network_sent_mb": 430.0, "cpu_percent": 7.0}, [], 20.0) == {
        "system/network_sent_mb_per_s": 3.0, "system/cpu_percent": 7.0}


def test_a_failed_run_has_its_error_and_exit_code_as_tags(config: RunConfig) -> None:
    client = Client()
    tracker, _ = start(config, lambda _: client)
    folder = RunFolder(Path(config.output_dir) / "run")
    with pytest.raises(ClusterError), folder.error_recorded():
        raise ClusterError("no worker is left")
    tracker.close("FAILED")
    tags = client.runs["id0"]["tags"]
    assert (tags["exit_code"], tags["error"]) == ("5", "no worker is left")


def test_the_table_of_workers_adds_up_jobs_waits_and_retries() -> None:
    table = WorkerTable()
    slow = replace(job(number=1, worker=1), seconds=5.0, attempt=2)
    for outer_iter in range(2):
        table.add(outer_iteration(outer_iter, jobs=(job(), slow)))
    first, second = csv.DictReader(table.csv("frames").splitlines())
    assert (first["frames_per_s"], first["wait_s"], first["retries"]) == ("8000.0", "6.0", "0")
    assert (second["frames_per_s"], second["wait_s"], second["retries"]) == ("3200.0", "0.0", "2")


def test_a_store_that_cannot_be_opened_does_not_stop_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", 0.3)

    def broken(_: str) -> Any:
        raise RuntimeError("such host")

    tracker, said = start(config, broken)
    tracker.outer_iteration(outer_iteration())
    tracker.close("FINISHED")
    assert "such host" in said[0]


def test_close_does_not_wait_forever(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", 0.1)
    never = threading.Event()
    tracker, said = start(config, lambda _: never.wait())
    tracker.outer_iteration(outer_iteration())
    tracker.close("FINISHED")
    assert not never.is_set()
    assert said[0].startswith("MLflow did not answer within")
    never.set()


def test_resumed_run_continues_in_the_same_runs(config: RunConfig) -> None:
    client = Client()
    tracker, _ = start(config, lambda _: client)
    tracker.outer_iteration(outer_iteration(0))
    tracker.close("KILLED")
    stored = read_tracking(Path(config.output_dir) / "run")
    assert (stored["run_id"], stored["experiment_id"]) == (tracker.run_id, tracker.experiment_id) == ("id0", "7")
    client.params.clear()
    again, said = start(config, lambda _: client)
    again.outer_iteration(outer_iteration(1))
    again.close("FINISHED")
    assert said == []
    assert again.run_id == tracker.run_id
    assert len(client.runs) == 3
    assert client.params == {}, "MLflow refuses to change a parameter"
    assert {run["status"] for run in client.runs.values()} == {"FINISHED"}


def test_damaged_tracking_file_starts_a_new_run(config: RunConfig) -> None:
    (Path(config.output_dir) / "run" / "tracking.json").write_text('{"run_id": ')
    client = Client()
    tracker, said = start(config, lambda _: client)
    tracker.close("FINISHED")
    assert said == [] and tracker.run_id == "id0"


@pytest.mark.end_to_end
def test_real_sqlite_store_has_the_run_its_workers_and_its_files(
        config: RunConfig, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # a fresh schema on a busy machine
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", 120.0)
    output_dir, said = Path(config.output_dir), list[str]()
    (output_dir / "run" / "final").mkdir()
    (output_dir / "run" / "final" / "about.json").write_text("{}")
    tracker = MlflowTracker(config, output_dir / "run", said.append)
    tracker.outer_iteration(outer_iteration(0))
    tracker.outer_iteration(outer_iteration(1))
    tracker.finished(final_report())
    tracker.close("KILLED")
    again = MlflowTracker(config, output_dir / "run", said.append)
    again.outer_iteration(outer_iteration(2))
    again.close("FINISHED")
    assert said == []
    assert capfd.readouterr().err == "", "MLflow and alembic are to keep quiet"

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{output_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("digits-relu")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["run", "worker 0", "worker 1"]
    run = runs["run"]
    assert run.info.status == "FINISHED" and run.data.metrics["2_wer/test"] == 3.1
    assert [point.step for point in client.get_metric_history(run.info.run_id, "1_objf/valid")] == [32000, 64000, 96000]
    assert run.data.params["schedule.num_epochs"] == str(config.schedule.num_epochs)
    assert run.data.tags["version.ngsgd"]
    assert runs["worker 1"].data.tags["mlflow.parentRunId"] == run.info.run_id
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "events.jsonl", "final", "layers.csv", "workers.csv"}
    assert json.loads((output_dir / "run" / "tracking.json").read_text())["run_id"] == run.info.run_id
    assert (output_dir / "mlartifacts").is_dir()

    # as on a full disk: nothing is printed in addition to the exception
    (output_dir / "mlflow.db").write_bytes(b"no database" * 1000)
    with pytest.raises(Exception, match="database"):
        client.search_experiments()
    assert capfd.readouterr().err == ""


# --------------------------------------------------------------------------------- servers that lie
class LyingClient(Client):
    """Of a server that names a place of its choice for a run's files."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = list(places)

    def get_run(self, run_id: str) -> Any:
        place = self.places.pop(0) if len(self.places) > 1 else self.places[0]
        return SimpleNamespace(info=SimpleNamespace(artifact_uri=place))

    def log_artifact(self, run_id: str, path: str) -> None:
        raise AssertionError(f"MLflow's own client would write {path} to {self.get_run(run_id).info.artifact_uri}")

    def log_artifacts(self, run_id: str, path: str, where: str) -> None:
        self.log_artifact(run_id, path)


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE:{}", "file://localhost{}", "runs:/0/{}", "models:/m/1", "", "relative",
                                  "c:{}"])
def test_a_server_cannot_have_files_written_on_this_machine(config: RunConfig, tmp_path: Path, form: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "run" / "final").mkdir()
    (tmp_path / "run" / "final" / "model.json").write_text("{}")
    config = replace(config, tracking=replace(config.tracking, uri="http://127.0.0.1:1", registered_model_name="m"))
    client = LyingClient(form.format(victim))
    tracker, said = start(config, lambda _: client)
    tracker.outer_iteration(outer_iteration(0))
    tracker.close("FINISHED")
    (warning,) = said
    assert repr(form.format(victim)) in warning
    assert list(victim.iterdir()) == []
    assert not (tmp_path / "relative").exists()
    assert client.metrics[0][0] == "run"
    assert {run["status"] for run in client.runs.values()} == {"FINISHED"}


def test_a_server_that_changes_its_answer_gets_no_further(config: RunConfig, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.store.artifact import artifact_repository_registry as registry

    asked: list[str] = []
    written: list[str] = []
    repository = SimpleNamespace(log_artifact=written.append, log_artifacts=lambda folder, name: written.append(name))

    def open_repository(uri: str, tracking_uri: str) -> Any:
        asked.append(uri)
        return repository
    monkeypatch.setattr(registry, "get_artifact_repository", open_repository)
    config = replace(config, tracking=replace(config.tracking, uri="http://127.0.0.1:1"))
    tracker, said = start(config, lambda _: LyingClient("mlflow-artifacts:/0/artifacts", str(tmp_path / "victim")))
    tracker.close("FINISHED")
    assert said == []
    assert asked == ["mlflow-artifacts:/0/artifacts"]
    assert {Path(path).name for path in written} >= {"config.yaml", "events.jsonl"}


@pytest.mark.services
def test_an_endless_answer_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal sent
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while sent < 2**28:
                    sent += self.wfile.write(bytes(2**16))

        def log_message(self, *_: object) -> None:
            pass
    monkeypatch.setattr(mlflow_store, "_MAX_ANSWER", 2**20)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        client = mlflow_store.open_client(f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(Exception, match="longer than"):
            client.get_experiment_by_name("any")
        server.shutdown()
        thread.join()
    assert sent < 2**27
