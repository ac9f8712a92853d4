"""Runs of a user's task: from Python and the command line, stopped, killed and continued."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ngsgd
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import RunConfig
from ngsgd.errors import CheckpointError, ConfigError, RunInterrupted
from ngsgd.files import read_json_lines
from ngsgd.launcher import cli
from ngsgd.pipeline.services import PoolRequest, Services
from ngsgd.runs import trust
from ngsgd.runs.run_folder import RunFolder
from ngsgd.tasks import DatasetTask
from ngsgd.tasks.functions import name_of
from ngsgd.training.job import Job
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord
from tests.tasks import blobs

SETTINGS: dict[str, Any] = {"num_epochs": 2, "batch_size": 16, "cluster": "in_process"}
ROOT = Path(__file__).resolve().parents[2]


def digest(run: Any) -> str:
    return hashlib.sha256((run.folder.final / "model.safetensors").read_bytes()).hexdigest()


def linear_task(x_ND: Tensor, y_ND: Tensor) -> DatasetTask:
    return DatasetTask(TensorDataset(x_ND, y_ND), lambda: nn.Linear(3, 3),
                       lambda model, batch: mse_loss(model(batch[0]), batch[1]))


def test_a_run_lowers_the_loss_and_can_be_loaded(tmp_path: Path) -> None:
    run = ngsgd.train(blobs.make_task, output_dir=tmp_path, services=Services(), **SETTINGS)
    events = read_json_lines(run.folder.events)
    records = [event for event in events if event["event"] == "outer_iteration"]
    first, last = records[0], records[-1]
    assert run.metrics["valid/loss"] < first["valid"]["loss"] and run.metrics["valid/accuracy"] > 0.7
    assert last["diagnostics"].keys() >= {"valid/accuracy", "train/accuracy"}
    loaded = ngsgd.load(run.folder.path, blobs.make_task)
    assert loaded.metrics == run.metrics
    state = loaded.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())
    assert run.evaluate() == run.metrics
    for path in (run.folder.config, run.folder.events):
        assert not re.findall(r"frame|\bwer|word|speech|utterance|corpus|ivector|accuracy\": 0.0", path.read_text())


def test_a_loss_of_any_scale_is_trained(tmp_path: Path) -> None:
    """Targets of pure noise with variance 10^4: the loss changes by far more than 1."""
    x, noise = torch.randn(2, 200, 3, generator=torch.Generator().manual_seed(0))
    task = linear_task(x, 100.0 * noise)
    run = ngsgd.train(task, output_dir=tmp_path, services=Services(), optimizer="sgd", lr=0.05, **SETTINGS)
    records = [event for event in read_json_lines(run.folder.events) if event["event"] == "outer_iteration"]
    losses = [record["valid"]["loss"] for record in records]
    assert max(after - before for before, after in pairwise(losses)) > 1.0


class StopAfter:
    def __init__(self) -> None:
        self.num_done = 0

    def trackers(self, _config: RunConfig, _folder: RunFolder) -> Sequence[Any]:
        return [self]

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.num_done += 1

    def incident(self, incident: Incident) -> None:
        pass

    def finished(self, report: FinalReport) -> None:
        pass

    def close(self, status: str) -> None:
        pass

    def requested(self) -> bool:
        return self.num_done >= 2

    def expired(self) -> bool:
        return False


@pytest.mark.slow
def test_a_stopped_run_continues_bitwise_identically(tmp_path: Path) -> None:
    whole = ngsgd.train(blobs.make_task, output_dir=tmp_path / "whole", services=Services(), **SETTINGS)
    stop = StopAfter()
    with pytest.raises(RunInterrupted):
        ngsgd.train(blobs.make_task, output_dir=tmp_path / "part", **SETTINGS,
                    services=Services(stop=stop, make_trackers=stop.trackers))
    [folder] = (tmp_path / "part").iterdir()
    assert not (folder / "final").exists()
    run = ngsgd.train(blobs.make_task, resume=folder, services=Services())
    assert digest(run) == digest(whole)


@pytest.mark.faults
def test_an_interrupt_after_training_is_recorded_and_the_run_resumes(tmp_path: Path) -> None:
    def interrupt(_events: Path, _picture: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(RunInterrupted) as caught:
        ngsgd.train(blobs.make_task, output_dir=tmp_path, services=Services(plot=interrupt), **SETTINGS)
    assert str(caught.value)[0].isalpha(), "there is a reason before the command"
    folder = next(tmp_path.glob("*/config.yaml")).parent
    assert RunFolder(folder).last_error()["exit_code"] == 130
    run = ngsgd.train(blobs.make_task, resume=folder, services=Services())
    assert run.metrics and not run.folder.last_error()


def test_a_worker_that_is_killed_changes_no_bit(tmp_path: Path) -> None:
    settings = {**SETTINGS, "cluster": "local", "num_epochs": 3}
    whole = ngsgd.train(blobs.make_slow_task, output_dir=tmp_path / "whole", services=Services(), **settings)

    class KillingPool(ProcessPool):
        """Kills the worker of the first job of outer iteration 2, just after the job was sent."""

        num_killed = 0

        def submit(self, job: Job) -> None:
            super().submit(job)
            if job.outer_iter == 1 and not self.num_killed:
                self.num_killed = 1
                [worker] = [index for index, (identity, _) in self.progress().items() if identity == job.identity]
                os.kill(self.process_ids()[worker], signal.SIGKILL)

    def make_pool(request: PoolRequest) -> Any:
        return KillingPool(request.spec, 2, 1, request.num_parameters, log_directory=request.log_directory,
                           agreement=request.agreement)

    run = ngsgd.train(blobs.make_slow_task, output_dir=tmp_path / "killed", **settings,
                      services=Services(make_pool=make_pool))
    deaths = [event for event in read_json_lines(run.folder.events) if event.get("what") == "worker_died"]
    assert len(deaths) == 1 and digest(run) == digest(whole)


TRAIN = ["train", "task=tests.tasks.blobs:make_task", f"task.search_path={ROOT}", "name=blobs", "cluster=in_process",
         "tracking.kind=none", "schedule.num_epochs=2", "schedule.minibatch_size=16", "--quiet"]


@pytest.mark.slow
def test_the_command_line_trains_and_resumes_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "allowed_modules", set())
    assert cli.main([*TRAIN, "task.args={shard_size: 80}"]) == 0
    said = capsys.readouterr().out
    assert "valid/loss" in said and "WER" not in said and "frames" not in said
    [run] = Path("runs").iterdir()
    # as of a process that was killed before its end
    (run / "finished.json").unlink()
    # this user began the run, so no flag is needed
    trust.allowed_modules.clear()
    assert cli.main(["resume", "blobs", "--quiet"]) == 0
    # for another user the run is a file that names code
    (run / "finished.json").unlink()
    trust.allowed_modules.clear()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert cli.main(["resume", "blobs", "--quiet"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert cli.main(["decode", str(run)]) == 2


@pytest.mark.parametrize(("words", "named"), [
    (["task=tests.tasks.blobs:nothing"], "tests.tasks.blobs:nothing"),
    (["task=tests.tasks.absent:make"], "tests.tasks.absent"),
    (["task=tests.tasks.blobs:no_task"], "no_task"),
    (["task.args={depth: 3}"], "depth"),
    (["data.corpus=an4"], "data.corpus"),
    (["model.hidden_dim=7"], "model.hidden_dim")])
def test_mistakes_are_reported_before_a_run_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
                                                       named: str, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TRAIN, *words]) == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/config.yaml"))


@pytest.mark.parametrize("settings", [
    {"model": "tdnn"}, {"data": {"corpus": "an4"}}, {"depth": 3}, {"optimizer": "adamm"}, {"num_epochs": -1.0},
    {"combination": {"kind": "generalized"}}, {"num_epochs": 1, "epochs": 2}])
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ngsgd.train(blobs.make_task, output_dir=tmp_path, cluster="in_process", services=Services(), **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "cluster", "message"), [
    (nn.Linear(3, 3), "in_process", "DatasetTask"), (blobs.dataset(), "in_process", "DatasetTask"),
    # no process can be sent it
    (lambda: blobs.make_task(90), "local", None)], ids=["module", "data", "lambda"])
def test_what_is_no_task_is_refused(tmp_path: Path, given: Any, cluster: str,
                                    message: str | None) -> None:
    with pytest.raises(ConfigError, match=message):
        ngsgd.train(given, output_dir=tmp_path, cluster=cluster, services=Services())
    assert not list(tmp_path.iterdir())


def wider_task() -> DatasetTask:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    return linear_task(x, x)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_run_of_another_task_is_never_trained_again(tmp_path: Path, is_kept: bool) -> None:
    run = ngsgd.train(blobs.make_task, output_dir=tmp_path, services=Services(), **{**SETTINGS, "num_epochs": 1})
    if not is_kept:
        shutil.rmtree(run.folder.checkpoints)
    before = digest(run), run.folder.events.read_bytes()
    with pytest.raises(CheckpointError):
        ngsgd.train(wider_task, resume=run.folder.path, services=Services())
    assert (digest(run), run.folder.events.read_bytes()) == before


def test_a_run_is_not_resumed_with_other_data(tmp_path: Path) -> None:
    stop = StopAfter()
    with pytest.raises(RunInterrupted):
        ngsgd.train(blobs.make_task, output_dir=tmp_path, **SETTINGS, services=Services(stop=stop, make_trackers=stop.trackers))
    [folder] = tmp_path.iterdir()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "error.json")}
    for size in (-1, 1):
        with pytest.raises(CheckpointError, match="data"):
            ngsgd.train(partial(resized_task, size), resume=folder, services=Services())
    assert before.items() <= {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}.items()
    assert ngsgd.train(partial(resized_task, 0), resume=folder, services=Services()).metrics


def resized_task(more: int) -> DatasetTask:
    """The task of `blobs` with so many examples more."""
    dataset = blobs.dataset()
    return DatasetTask(TensorDataset(*(torch.cat([one, one[:1]])[:len(one) + more] for one in dataset.tensors)),
                       blobs.make_model, blobs.mean_loss, shard_size=60)


def test_a_model_of_another_width_and_a_task_without_a_name(tmp_path: Path) -> None:
    settings = {**SETTINGS, "num_epochs": 1, "cluster": "local"}
    run = ngsgd.train(blobs.make_task, output_dir=tmp_path, services=Services(), **settings)
    # a function that could not be sent to workers
    loaded = ngsgd.load(run.folder.path, lambda: blobs.make_task(60)).model
    assert all(map(torch.equal, loaded.parameters(), run.model.parameters()))
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        _ = ngsgd.load(run.folder.path, lambda: DatasetTask(blobs.dataset(), partial(blobs.make_model, 24), blobs.mean_loss)).model
    assert name_of(partial(partial(blobs.make_task))) == "make_task"


def test_a_run_from_python_is_not_resumed_without_its_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ngsgd.train(blobs.make_task, output_dir=tmp_path, services=Services(), **{**SETTINGS, "num_epochs": 1})
    with pytest.raises(ConfigError):
        ngsgd.load(run.folder.path).train()
    with pytest.raises(ConfigError) as refused:
        _ = ngsgd.load(run.folder.path).model
    assert cli.main(["resume", str(run.folder.path)]) == 2
    assert "--trust" not in f"{refused.value}{capsys.readouterr().err}"
    with pytest.raises(ConfigError):
        ngsgd.train(blobs.make_task, resume=run.folder.path, seed=3)
    # an unfinished one has no scores and no model
    run.folder.metrics.unlink()
    shutil.rmtree(run.folder.final)
    loaded = ngsgd.load(run.folder.path, blobs.make_task)
    for name in ("metrics", "model"):
        with pytest.raises(CheckpointError):
            getattr(loaded, name)


@pytest.mark.slow
def test_a_task_trains_without_speech_and_without_the_packages_of_the_service(tmp_path: Path) -> None:
    absent = ["ngsgd.asr", "ray", "hydra", "omegaconf", "mlflow", "rich", "matplotlib", "kaldifst", "soundfile"]
    code = (f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
            "import ngsgd\nfrom tests.tasks import blobs\n"
            "run = ngsgd.train(blobs.make_task, cluster='in_process', num_epochs=1, batch_size=32)\n"
            "assert run.metrics['valid/loss'] < 1.4")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_options_have_the_names_that_pytorch_people_know(tmp_path: Path) -> None:
    run = ngsgd.train(blobs.make_task(), output_dir=tmp_path, services=Services(), num_workers=3, cluster="in_process", lr=0.01,
                      batch_size=32, num_epochs=1, optimizer="adamw", outer={"kind": "diloco", "lr": 0.5}, seed=3, name="mine")
    config = run.config
    assert (config.schedule.lr_initial, config.schedule.lr_final, config.schedule.minibatch_size) == (0.01, 0.01, 32)
    assert (config.optimizer.kind, config.outer.kind, config.outer.lr) == ("adamw", "diloco", 0.5)
    assert config.cluster.num_workers == config.schedule.num_jobs_final == 3 and run.folder.path.name.startswith("mine-")


@pytest.mark.parametrize(("num_jobs", "warns"), [(1, False), (40, True)])
def test_more_jobs_than_the_data_has_shards_give_a_warning(num_jobs: int, warns: bool, tmp_path: Path) -> None:
    said: list[str] = []
    schedule = {"num_jobs_initial": num_jobs, "num_jobs_final": num_jobs}
    ngsgd.train(blobs.make_task, output_dir=tmp_path, services=Services(warn=said.append), schedule=schedule,
                **{**SETTINGS, "num_epochs": 1})
    assert any("schedule.num_epochs" in line for line in said) == warns
