"""The place of a run: settings, the active run of a Python program, or MLflow's variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

import ngsgd
from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.launcher.mlflow import store
from ngsgd.launcher.mlflow import tracker as mlflow_tracker
from ngsgd.launcher.mlflow.store import read_tracking
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.runs import config_file
from tests.launcher.records import final_report, outer_iteration
from tests.tasks import blobs
from tests.tiers import HANGS_S


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No variable of MLflow, no active run afterwards, and a folder for files of experiments."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    for name in store.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", HANGS_S)
    yield
    while mlflow.active_run():
        mlflow.end_run()


@pytest.fixture(scope="module")
def server_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store whose schema exists: making one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    # the files of its experiments are below the current folder
    with contextlib.chdir(folder):
        MlflowClient(f"sqlite:///{folder}/shared.db").search_experiments()
    return f"sqlite:///{folder}/shared.db"


def configured(tmp_path: Path, **tracking: Any) -> RunConfig:
    config = RunConfig(output_dir=str(tmp_path))
    return replace(config, tracking=replace(config.tracking, **tracking))


@pytest.mark.parametrize(("given", "around", "expected", "unused"), [
    ({}, {}, ("", "", ""), []),
    ({}, {"URI": "http://a", "EXPERIMENT_NAME": "e"}, ("http://a", "e", ""), []),
    ({"uri": "http://b"}, {"URI": "http://a"}, ("http://b", "", ""), ["MLFLOW_TRACKING_URI"]),
    ({"uri": "http://a"}, {"URI": "http://a"}, ("http://a", "", ""), []),
    ({"uri": "http://a"}, {"URI": "http://me:secret-word@a"}, ("http://a", "", ""), []),
    ({"experiment_name": "f"}, {"EXPERIMENT_NAME": "e"}, ("", "f", ""), ["MLFLOW_EXPERIMENT_NAME"]),
    # the experiment is that of the run
    ({}, {"EXPERIMENT_NAME": "e", "RUN_ID": "r"}, ("", "", "r"), []),
    ({"run_id": "s"}, {"EXPERIMENT_NAME": "e", "RUN_ID": "r"}, ("", "", "s"), ["MLFLOW_RUN_ID"]),
    ({"experiment_name": "f"}, {"RUN_ID": "r"}, ("", "f", ""), ["MLFLOW_RUN_ID"]),
    ({"uri": "http://b"}, {"URI": "http://a", "RUN_ID": "r"}, ("http://b", "", ""), ["MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"]),
    # a run of a sweep, whose parent is the run of the environment
    ({"parent_run_id": "r"}, {"RUN_ID": "r"}, ("", "", ""), []),
    ({"kind": "none"}, {"URI": "http://a", "RUN_ID": "r"}, ("", "", ""), []),
])
def test_a_setting_wins_and_the_variable_that_it_replaces_is_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], around: dict[str, str],
        expected: tuple[str, str, str], unused: list[str]) -> None:
    run = SimpleNamespace(info=SimpleNamespace(lifecycle_stage="active"))
    monkeypatch.setattr(store, "open_client", lambda _: SimpleNamespace(get_run=lambda _: run))
    for name, value in around.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}" if name == "URI" else f"MLFLOW_{name}", value)
    said: list[str] = []
    found = store.resolved(configured(tmp_path, **given), said.append).tracking
    assert (found.uri, found.experiment_name, found.run_id) == expected
    assert sorted(name for name in store.VARIABLES if any(f"{name}," in line for line in said)) == unused
    assert len(said) == len(unused) and "secret-word" not in str(said)


def test_a_run_that_does_not_exist_or_was_deleted_is_an_error_before_anything_starts(tmp_path: Path, server_uri: str) -> None:
    client = MlflowClient(server_uri)
    run_id = client.create_run("0").info.run_id
    config = configured(tmp_path, uri=server_uri, run_id=run_id)
    assert store.resolved(config, pytest.fail) == config
    client.delete_run(run_id)
    for wrong in (run_id, "0" * 32):
        with pytest.raises(ConfigError, match="MLFLOW_RUN_ID"):
            store.resolved(configured(tmp_path, uri=server_uri, run_id=wrong), pytest.fail)
    with pytest.raises(ConfigError, match="MLFLOW_RUN_ID"):
        ngsgd.train(blobs.make_task, cluster="in_process", output_dir=tmp_path,
                    tracking={"kind": "mlflow", "uri": server_uri, "run_id": run_id})
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_down_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(_: str) -> Any:
        raise OSError("connection refused")
    monkeypatch.setattr(store, "open_client", down)
    config = configured(tmp_path, uri="http://127.0.0.1:1", run_id="r")
    assert store.resolved(config, pytest.fail) == config


def sent(config: RunConfig, folder: Path) -> list[str]:
    """Track a run of two outer iterations; returns the warnings."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config_file.to_yaml(config))
    said: list[str] = []
    tracker = MlflowTracker(config, folder, said.append)
    for number in range(2):
        tracker.outer_iteration(outer_iteration(number))
    tracker.finished(final_report())
    tracker.close("FINISHED")
    return said


def test_the_run_of_the_environment_receives_the_results_and_keeps_what_it_has(
        tmp_path: Path, server_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(server_uri)
    run = client.create_run(client.create_experiment("theirs"), run_name="mine", tags={"version.torch": "theirs"})
    client.log_param(run.info.run_id, "seed", "17")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_uri)
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    config = store.resolved(configured(tmp_path), pytest.fail)
    [line] = sent(config, tmp_path / "run")
    assert "seed" in line
    found = client.get_run(run.info.run_id)
    assert (found.info.run_name, found.info.status, found.info.experiment_id) == ("mine", "FINISHED", run.info.experiment_id)
    assert found.data.metrics["2_wer/test"] == 3.1
    assert found.data.params["seed"] == "17" and found.data.params["schedule.num_epochs"] == str(config.schedule.num_epochs)
    assert found.data.tags["version.torch"] == "theirs" and found.data.tags["version.ngsgd"]
    # a resumed run continues there without the variables, and sends no parameters again
    for name in store.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert sent(config, tmp_path / "run") == []
    assert read_tracking(tmp_path / "run")["run_id"] == run.info.run_id
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_the_experiment_of_the_environment_is_used_by_name_and_by_number(
        tmp_path: Path, server_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(server_uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    named = store.experiment_id(client, store.resolved(configured(tmp_path), pytest.fail))
    assert client.get_experiment(named).name == "named"
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", named)
    assert store.experiment_id(client, configured(tmp_path)) == named
    assert store.experiment_id(client, configured(tmp_path, experiment_name="other")) != named
    client.delete_experiment(named)
    with pytest.raises(ValueError, match="deleted"):
        store.experiment_id(client, configured(tmp_path))


def test_a_login_of_the_environment_opens_a_store_whose_login_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret-word@host")
    assert store.with_login("https://***@host") == "https://me:secret-word@host"
    with pytest.raises(ConfigError):
        store.with_login("https://***@another")


@pytest.mark.end_to_end
def test_training_inside_an_active_run_writes_to_it_and_leaves_it_open(tmp_path: Path, server_uri: str) -> None:
    mlflow.set_tracking_uri(server_uri)
    with mlflow.start_run() as run:
        trained = ngsgd.train(blobs.make_task, cluster="in_process", output_dir=tmp_path, num_epochs=1, quiet=True)
        client = MlflowClient(server_uri)
        assert client.get_run(run.info.run_id).info.status == "RUNNING", "the program ends it"
        assert mlflow.active_run() is not None
        mlflow.log_metric("own", 1.0)
    found = client.get_run(run.info.run_id)
    assert found.info.status == "FINISHED" and found.data.metrics["own"] == 1.0
    history = client.get_metric_history(run.info.run_id, "1_loss/valid")
    assert history and history[-1].step > 0
    assert read_tracking(trained.folder.path)["run_id"] == run.info.run_id


@pytest.mark.slow
def test_a_setting_wins_over_the_active_run(tmp_path: Path, server_uri: str) -> None:
    mlflow.set_tracking_uri(server_uri)
    with mlflow.start_run() as run:
        said: list[str] = []
        found = store.resolved(configured(tmp_path, experiment_name="another"), said.append).tracking
        assert (found.uri, found.run_id) == (server_uri, "") and run.info.run_id in said[0]
        off = ngsgd.train(blobs.make_task, cluster="in_process", output_dir=tmp_path, num_epochs=1, quiet=True, tracking="none")
        assert not read_tracking(off.folder.path)
    assert not MlflowClient(server_uri).get_run(run.info.run_id).data.metrics


def test_a_sweep_has_a_parent_run(tmp_path: Path, server_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(server_uri)
    configs = [replace(configured(tmp_path, uri=server_uri), seed=seed) for seed in (0, 1)]
    with store.sweep(configs, pytest.fail) as [setting]:
        name, _, parent = setting.partition("=")
        assert name == "tracking.parent_run_id"
        for config in configs:
            one = replace(config, tracking=replace(config.tracking, parent_run_id=parent))
            assert sent(one, tmp_path / f"run{config.seed}") == []
    experiment = client.get_run(parent).info.experiment_id
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert {run.info.run_name for run in children} == {"run0", "run1"}
    assert client.get_run(parent).info.status == "FINISHED"
    with pytest.raises(KeyboardInterrupt), store.sweep(configs, pytest.fail) as [setting]:
        raise KeyboardInterrupt
    assert client.get_run(setting.partition("=")[2]).info.status == "KILLED"
    # a run of the environment is the parent
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_uri)
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    with store.sweep(configs, pytest.fail) as settings:
        assert settings == [f"tracking.parent_run_id={parent}"]


def test_runs_of_a_sweep_that_are_not_in_one_store_have_no_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off, on = configured(tmp_path, kind="none"), configured(tmp_path)
    for configs in ([], [off, off], [off, on], [configured(tmp_path, parent_run_id="p")]):
        with store.sweep(configs, pytest.fail) as settings:
            assert settings == []
    with pytest.raises(ConfigError, match="parent_run_id"), store.sweep([configured(tmp_path, run_id="r")], pytest.fail):
        pass

    def down(_: str) -> Any:
        raise OSError("connection refused")
    monkeypatch.setattr(store, "open_client", down)
    said: list[str] = []
    with store.sweep([on, on], said.append) as settings:
        assert settings == [] and "connection refused" in said[0]
