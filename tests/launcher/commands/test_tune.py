"""`ngsgd tune` from the command line to the settings that `ngsgd train` takes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ngsgd.config import OptimizerConfig, ProxyConfig, RunConfig, TrackingConfig, TuneConfig
from ngsgd.errors import ConfigError
from ngsgd.hypergrad import BaseHyperparameters, HyperSpace
from ngsgd.launcher.commands import tune
from ngsgd.launcher.config import compose
from ngsgd.pipeline.tuning import Proxy, settings_of
from ngsgd.training.worker import Worker
from ngsgd.yaml_text import dump_yaml
from tests import toy

_BUDGET = 7.0  # a coarse trial, a run with its reverse pass, and a step along what that gives


def config(folder: Path, **changes: Any) -> RunConfig:
    """A proxy of 8 minibatches on the toy task."""
    settings = {"output_dir": str(folder / "runs"), "name": "toy", "tracking": TrackingConfig(kind="none"),
                "optimizer": OptimizerConfig(kind="sgd", momentum=0.9),
                "tune": TuneConfig(proxy=ProxyConfig(8, 2), budget=_BUDGET), **changes}
    made = toy.config(**settings)
    return replace(made, cluster=replace(made.cluster, kind="in_process"))


@pytest.fixture
def on_toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`ngsgd tune` on prepared toy examples."""
    from ngsgd.pipeline import prepare

    def call(made: RunConfig, *more: str) -> int:
        egs = toy.Run(tmp_path, made).egs
        monkeypatch.setattr(compose, "compose", lambda overrides, config_dir=None: made)
        monkeypatch.setattr(prepare, "prepare", lambda *_: type("Data", (), {"egs_directory": egs})())
        return tune.command([*more])
    return call


@pytest.mark.slow
def test_run_writes_settings_that_train_takes(on_toy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_toy(config(tmp_path)) == 0
    folder = tmp_path / "runs" / "tune" / "toy"
    assert {file.name for file in folder.iterdir()} >= {"tuned.yaml", "tuned.json", "trials.jsonl", "schedule.png"}
    result = json.loads((folder / "tuned.json").read_text())
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [trial["kind"] for trial in trials] == ["coarse", "descent", "descent"] and trials[1]["report"]["engine"] == "store"
    assert result["cost"] <= _BUDGET
    with pytest.raises(ConfigError, match="exists"):
        on_toy(config(tmp_path))
    capsys.readouterr()
    assert on_toy(config(tmp_path, name="other"), "--json", "--quiet") == 0
    assert json.loads(capsys.readouterr().out)["valid"] == result["valid"]


def test_another_optimizer_is_refused(on_toy: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimizer=sgd"):
        on_toy(config(tmp_path, optimizer=OptimizerConfig()))


# The file -----------------------------------------------------------------------------------------


def _tuned(folder: Path) -> tuple[HyperSpace, torch.Tensor, Path]:
    space = HyperSpace(BaseHyperparameters(0.02, 0.002, 0.9, 1e-2, 0.5),
                       ("affine1", "affine2", "output"), 8, 2, 2,
                       ("schedule", "layer_lr", "l2", "momentum", "max_change", "init_scale"), 3)
    theta_D = space.center() + 0.1 * torch.arange(space.size, dtype=torch.float64)
    path = folder / "tuned.yaml"
    made = toy.config(optimizer=OptimizerConfig(kind="sgd"))
    path.write_text("# from a test\n" + dump_yaml(settings_of(made, space, space.values(theta_D), 2)))
    return space, theta_D, path


def test_a_tuned_file_becomes_settings_and_later_ones_win(tmp_path: Path) -> None:
    space, theta_D, path = _tuned(tmp_path)
    values = space.values(theta_D)
    made = compose.compose([f"+tuned={path}", "optimizer.momentum=0.5"])
    assert made.optimizer.kind == "sgd" and made.optimizer.momentum == 0.5
    rates = [2 * made.schedule.lr_initial * factor for factor in made.schedule.lr_factors]
    assert rates == pytest.approx(values["schedule"])
    assert made.optimizer.layer_options is not None and made.model.init_scales is not None
    assert made.optimizer.layer_options["affine2"]["lr_factor"] == pytest.approx(values["layer_lr"][1])
    assert made.model.init_scales["output"] == pytest.approx(values["init_scale"][2])


@pytest.mark.parametrize(("text", "told"), [(None, "read"), ("a: [", "YAML"), ("words", "settings")])
def test_files_that_hold_no_settings_are_refused(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "tuned.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        compose.compose([f"+tuned={path}"])


def test_a_job_of_ngsgd_train_does_what_the_proxy_did(tmp_path: Path) -> None:
    # one job, one outer iteration: the proxy's steps and the worker's must agree in every tuned
    # number
    made = toy.config(optimizer=OptimizerConfig(kind="sgd", momentum=0.8, max_change=0.3, max_param_change=0.4, weight_decay=1e-4,
                                                layer_options={"affine1": {"lr_factor": 1.5, "weight_decay": 3e-4}}))
    made = replace(made, model=replace(made.model, init_scales={"affine1": 0.8}), schedule=replace(
        made.schedule, lr_initial=0.004, lr_final=0.004, num_jobs_initial=1, num_jobs_final=1))
    run = toy.Run(tmp_path, made)
    # the last minibatch is a smaller one
    num_steps = -(-run.reader.num_frames(run.schedule.shard(0)) // 64) - 1
    proxied = replace(made, tune=TuneConfig(proxy=ProxyConfig(num_steps, 1)))
    proxy = Proxy.of(proxied, run.egs)
    from ngsgd.hypergrad.gradient import LocalJobs
    from ngsgd.hypergrad.training_task import Flat

    plan = proxy.space.build(proxy.space.center())
    scale_P = 2.0 * 64
    plan = replace(plan, l2_G=torch.tensor([3e-4, 1e-4, 1e-4], dtype=torch.float64) * scale_P,
                   lr_TG=plan.lr_TG * torch.tensor([1.5, 1.0, 1.0], dtype=torch.float64))
    flat = Flat.of(proxy.task)
    jobs = LocalJobs(proxy.task, plan, "none")
    ours_P = jobs.run(0, 0, flat.flatten(list(proxy.task.start.values())).double())
    from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem

    worker = Worker(run.spec, 0)
    start = LocalRef(worker.layout.flatten(worker.model.state_dict()))
    piece = WorkItem(run.schedule.shard(0), 0, 0, 0, num_steps)
    sent = worker.run(Job(0, 0, 1, (piece,), JobInit(start), 0.004, 1.0)).sent.read()
    # float32 there, and momentum inside the rate
    assert torch.allclose(torch.from_numpy(sent).double(), ours_P, atol=2e-5)


@pytest.mark.parametrize(("setting", "told"), [
    ("schedule.lr_factors=[1,0]", "above 0"), ("optimizer.layer_options={affine1:{lr:1}}", "such as {lr_factor: 1.3}"),
    ("model.init_scales={affine1:-1}", "above 0"), ("tune.proxy.steps=401", "tune.proxy.outer_iters")])
def test_impossible_settings_are_reported(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        compose.compose([setting])
