"""A run in MLflow: requests, that nothing of it can hurt training, and once for real in SQLite."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ngsgd.config import RunConfig
from ngsgd.errors import ClusterError
from ngsgd.launcher.config import compose
from ngsgd.launcher.mlflow import metrics
from ngsgd.launcher.mlflow import tracker as mlflow_tracker
from ngsgd.launcher.mlflow.store import read_tracking
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.runs import config_file
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord
from ngsgd.training.storage.event_log import EventLog
from tests.launcher.records import final_report, job, outer_iteration
from tests.tiers import HANGS_S


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
        data = SimpleNamespace(tags=self.runs.get(run_id, {}).get("tags", {}), params=dict(self.params))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, artifact_uri="/srv/mlruns", experiment_id="7"), data=data)

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        assert self.may_answer.wait(HANGS_S)
        self.runs[run_id]["tags"] |= {tag.key: tag.value for tag in tags}
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

    def delete_tag(self, run_id: str, key: str) -> None:
        del self.runs[run_id]["tags"][key]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = compose.compose([f"output_dir={tmp_path}"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_file.to_yaml(config))
    (tmp_path / "run" / "events.jsonl").write_text("{}\n")
    return config


def start(config: RunConfig, make_client: Callable[[str], Any]) -> tuple[MlflowTracker, list[str]]:
    said: list[str] = []
    return MlflowTracker(config, Path(config.output_dir) / "run", said.append, make_client=make_client), said


def tracked(config: RunConfig, *records: OuterIterationRecord, client: Client | None = None,
            status: str = "FINISHED", report: FinalReport | None = None) -> tuple[Client, list[str]]:
    """What the store gets of a run with these outer iterations, and the warnings."""
    client = client or Client()
    tracker, said = start(config, lambda _: client)
    for record in records:
        tracker.outer_iteration(record)
    if report:
        tracker.finished(report)
    tracker.close(status)
    return client, said


def steps(client: Client) -> list[int]:
    return [figures["1_objf/valid"][1] for name, figures in client.metrics if name == "run"]


def test_every_outer_iteration_is_one_batch_at_frames_processed(config: RunConfig) -> None:
    client, said = tracked(config, outer_iteration(0), outer_iteration(1), report=final_report())
    assert said == []
    assert [name for name, _ in client.metrics] == ["run"] * 3
    first = client.metrics[0][1]
    assert first["1_objf/train"] == (-1.79, 32000) and first["3_accuracy/valid"] == (0.612, 32000)
    assert {"optimizer/lr", "optimizer/layer_updates_clipped", "time/compute_s", "time/checkpoint_s",
            "workers/jobs_accepted", "optimizer/relative_change_max"} <= first.keys()
    assert client.metrics[-1][1]["2_wer/test"][0] == 3.1 and client.metrics[-1][1]["2_wer/valid"][0] == 2.8
    assert {run["status"] for run in client.runs.values()} == {"FINISHED"}
    assert client.params["optimizer.max_change"] == str(config.optimizer.max_change)
    assert all(client.params.values()), "an empty parameter shows as a blank"
    assert {"config.yaml", "events.jsonl"} <= set(client.artifacts)


def test_infinity_becomes_a_gap_and_bad_names_are_fixed(config: RunConfig) -> None:
    record = outer_iteration(valid_objf=-math.inf)
    record.diagnostics["block:0(x)"] = 0.5
    client, said = tracked(config, record)
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
    assert steps(client) == [32000, 64000, 96000]


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
    _, said = tracked(config, outer_iteration(3), client=second)
    assert steps(client) == [32000, 64000, 96000, 128000] and said == []


def test_a_message_that_the_store_refuses_does_not_hold_up_the_others(config: RunConfig) -> None:
    class Refusing(Client):
        def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
            if any(point.step == 32000 for point in metrics):
                error = RuntimeError("no such name")
                error.error_code = "INVALID_PARAMETER_VALUE"  # type: ignore[attr-defined]
                raise error
            super().log_batch(run_id, metrics, params, tags)

    client, said = tracked(config, outer_iteration(0), outer_iteration(1), client=Refusing())
    assert steps(client) == [64000]
    assert said[-1].startswith("1 update did not reach MLflow")


def test_an_emptied_store_gets_the_complete_run_again_tagged(config: RunConfig) -> None:
    folder = Path(config.output_dir) / "run"
    EventLog(folder / "events.jsonl").outer_iteration(outer_iteration(0))
    (folder / "tracking.json").write_text(json.dumps(
        {"tracking_uri": "elsewhere", "experiment_id": "1", "run_id": "old", "sent": 0}))
    client, _ = tracked(config)
    assert client.runs["id0"]["tags"]["resumed_from"] == "old"
    assert client.metrics[0][1]["1_objf/valid"] == (-1.92, 32000)
    # a damaged file also starts a new run
    (folder / "tracking.json").write_text('{"run_id": ')
    client, said = tracked(config)
    assert said == [] and [*client.runs] == ["id0"]


def test_every_machine_has_a_separate_load_section_and_batches_stay_within_the_limit(config: RunConfig) -> None:
    away = tuple(replace(job(number=number, worker=number), host=f"n{number % 40:02}",
                         machine={f"figure{index}": 100.0 * number + index for index in range(50)}) for number in range(41))
    client, _ = tracked(config, outer_iteration(0, jobs=(job(), *away)))
    assert len(client.metrics) == 2 and all(len(figures) <= 1000 for _, figures in client.metrics)
    sent = {name: value for _, figures in client.metrics for name, (value, _) in figures.items()}
    assert sent["system/n01/figure3"] == 103.0 and sent["system/n00/figure0"] == 4000.0, "the last job of a machine tells"
    assert len({name.split("/")[1] for name in sent if name.startswith("system/n") and name.count("/") == 2}) == 32


def test_the_scores_come_first_and_no_metric_is_always_zero(config: RunConfig) -> None:
    layers = {f"affine{number}": 0.1 for number in range(20)}
    health = {f"{layer}/{figure}": 0.5 for layer in layers
              for figure in ("limited", "cosine", "input_last_e", "input_effective_rank", "output_last_e", "output_effective_rank")}
    jobs = tuple(replace(job(number=number, worker=number), health=health) for number in range(4))
    record = replace(outer_iteration(0, jobs=jobs), relative_change={**layers, "output.weight": 8e10})
    client, _ = tracked(config, record)
    [(_, figures)] = client.metrics
    assert sorted(figures)[:2] == ["1_objf/train", "1_objf/valid"] and len(figures) <= 40
    assert figures["optimizer/relative_change_max"][0] == 0.1, "a parameter that was zero has no relative change"
    assert not {"workers/deaths", "workers/jobs_deferred", "workers/results_discarded", "workers/incidents"} & figures.keys()




def nvml() -> ModuleType:
    """nvidia-ml-py with two GPUs, of which the second has no power sensor."""
    class NVMLError(Exception):
        pass

    def power(gpu: int) -> int:
        if gpu:
            raise NVMLError("not supported")
        return 300_000

    found = ModuleType("pynvml")
    vars(found).update(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=(gpu + 1) * 10**9, total=4 * 10**9),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=50 + gpu),
        nvmlDeviceGetPowerUsage=power, nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 600_000)
    return found


def test_all_gpus_of_this_machine_and_of_others_have_mlflows_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.system_metrics.metrics import gpu_monitor

    monkeypatch.setitem(sys.modules, "pynvml", found := nvml())
    monkeypatch.setattr(gpu_monitor, "pynvml", found, raising=False)
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    load = metrics.MachineLoad(tmp_path)
    assert load.taken() == {}, "before it starts"
    load.start()
    here, away = load.taken(), metrics.load_of_machine(tmp_path)
    load.close()
    of_gpus = {name: value for name, value in away.items() if name.startswith("gpu_")}
    assert of_gpus == {
        "gpu_0_memory_usage_megabytes": 1000.0, "gpu_0_memory_usage_percentage": 25.0, "gpu_0_utilization_percentage": 50.0,
        "gpu_0_power_usage_watts": 300.0, "gpu_1_memory_usage_megabytes": 2000.0, "gpu_1_memory_usage_percentage": 50.0,
        "gpu_1_utilization_percentage": 51.0}
    assert of_gpus == {name: here[f"system/{name}"] for name in of_gpus}
    assert {f"system/{name}" for name in away} <= here.keys(), "one name for one figure"


def test_system_metrics_obey_mlflows_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_NODE_ID", "head")
    load = metrics.MachineLoad(tmp_path)
    load.start()
    assert "system/head/cpu_utilization_percentage" in load.taken()
    load.close()
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")
    off = metrics.MachineLoad(tmp_path)
    off.start()
    assert off.taken() == {}


def test_a_failed_run_has_its_error_and_exit_code_as_tags(config: RunConfig) -> None:
    folder = RunFolder(Path(config.output_dir) / "run")
    with pytest.raises(ClusterError), folder.error_recorded():
        raise ClusterError("no worker is left")
    client, _ = tracked(config, status="FAILED")
    run = client.runs["id0"]
    found = (run["status"], run["tags"]["exit_code"], run["tags"]["error"])
    assert found == ("FAILED", "5", "no worker is left")


@pytest.mark.parametrize(("status", "is_kept"), [("FINISHED", False), ("KILLED", True)])
def test_a_run_that_ends_well_has_no_tags_of_an_earlier_process(config: RunConfig, status: str, is_kept: bool) -> None:
    class Resumed(Client):
        def create_run(self, experiment_id: str, *, tags: dict[str, str], run_name: str) -> Any:
            return super().create_run(experiment_id, tags={**tags, "exit_code": "130", "error": "stopped"}, run_name=run_name)
    client, said = tracked(config, outer_iteration(), client=Resumed(), status=status)
    assert not said and ({"exit_code", "error"} <= client.runs["id0"]["tags"].keys()) == is_kept


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


def test_a_resumed_run_continues_in_the_same_run_of_mlflow(config: RunConfig) -> None:
    client = Client()
    tracker, _ = start(config, lambda _: client)
    tracker.outer_iteration(outer_iteration(0))
    tracker.close("KILLED")
    stored = read_tracking(Path(config.output_dir) / "run")
    assert (stored["run_id"], stored["experiment_id"]) == (tracker.run_id, tracker.experiment_id) == ("id0", "7")
    client.params.clear()
    _, said = tracked(config, outer_iteration(1), client=client)
    assert said == []
    assert len(client.runs) == 1
    assert client.params == {}, "MLflow refuses to change a parameter"
    assert {run["status"] for run in client.runs.values()} == {"FINISHED"}


@pytest.mark.end_to_end
def test_real_sqlite_store_has_the_run_and_its_files(
        config: RunConfig, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # a fresh schema on a busy machine
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", 120.0)
    output_dir, said = Path(config.output_dir), list[str]()
    (output_dir / "run" / "final").mkdir()
    (output_dir / "run" / "final" / "about.json").write_text("{}")
    tracker = MlflowTracker(config, output_dir / "run", said.append)
    while not any(thread.name == "system metrics" for thread in threading.enumerate()):
        time.sleep(0.05)
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
    [run] = runs.values()
    assert run.info.status == "FINISHED" and run.data.metrics["2_wer/test"] == 3.1
    assert [point.step for point in client.get_metric_history(run.info.run_id, "1_objf/valid")] == [32000, 64000, 96000]
    assert run.data.params["schedule.num_epochs"] == str(config.schedule.num_epochs)
    assert run.data.tags["version.ngsgd"]
    # the names by which MLflow finds them for its page of system metrics
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 0.0
    assert "system/cpu_utilization_percentage" in run.data.metrics
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "events.jsonl", "final"}
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
        return SimpleNamespace(info=SimpleNamespace(artifact_uri=place), data=SimpleNamespace(tags={}))

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
    client, (warning,) = tracked(config, outer_iteration(0), client=LyingClient(form.format(victim)))
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
    liar = LyingClient("mlflow-artifacts:/0/artifacts", str(tmp_path / "victim"))
    _, said = tracked(config, client=liar)
    assert said == []
    assert asked == ["mlflow-artifacts:/0/artifacts"]
    assert {Path(path).name for path in written} >= {"config.yaml", "events.jsonl"}
