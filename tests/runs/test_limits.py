"""Settings that nothing could carry out end in one error, before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ngsgd.asr.corpora import corpus
from ngsgd.config import EgsConfig, ModelConfig, RunConfig, ScheduleConfig
from ngsgd.errors import ConfigError
from ngsgd.launcher import cli
from ngsgd.models import Window, build_model
from ngsgd.models.build import least_parameters
from ngsgd.pipeline import prepare
from ngsgd.runs import limits


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(*_: object, **__: object) -> Any:
        raise AssertionError("data was made")
    monkeypatch.setattr(corpus, "prepare", prepared)
    monkeypatch.setattr(prepare, "with_alignment", prepared)


@pytest.mark.parametrize("words", [["model.hidden_dim=1000000000"], ["schedule.num_jobs_final=100000000"],
                                   ["model=pnorm", "model.hidden_dim=1000000000"],
                                   ["model=tdnnf", "model.hidden_dim=100000000000"]],
                         ids=" ".join)
def test_impossible_sizes_are_reported_before_data_is_prepared(
        no_data: None, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "cluster=in_process", f"output_dir={tmp_path}", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("ngsgd: ") == 1 and words[-1].partition("=")[0] in said
    assert not list(tmp_path.iterdir())


def test_a_run_of_too_many_passes_is_reported_before_its_archives_are_written() -> None:
    config = RunConfig(egs=EgsConfig(samples_per_iter=1), schedule=ScheduleConfig(num_epochs=1000.0))
    with pytest.raises(ConfigError, match=r"egs\.samples_per_iter"):
        limits.require_schedule(config, 480_000)
    limits.require_schedule(RunConfig(), 10**9)
    limits.require_schedule(config, 30)


@pytest.mark.parametrize("model", [ModelConfig(), ModelConfig(kind="pnorm", hidden_dim=250), ModelConfig(num_layers=1),
                                   ModelConfig(kind="tdnn", num_layers=2, tdnn_offsets="-1,0,1 0"),
                                   ModelConfig(kind="tdnnf", num_layers=2, tdnn_offsets="-1,0,1 -1,0", bottleneck_dim=16)])
def test_the_bound_is_never_above_the_size(model: ModelConfig) -> None:
    built = build_model(model, 40, 30, 0, window=Window(4, 3, 5))
    size = sum(parameter.numel() for parameter in built.parameters())
    assert 0 < least_parameters(model, 1, 1) <= size
    assert least_parameters(ModelConfig(), 40, 30) <= sum(
        parameter.numel() for parameter in build_model(ModelConfig(), 40, 30, 0).parameters())


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("100000\n")
    monkeypatch.setattr(limits, "CGROUP_LIMIT", tmp_path / "memory.max")
    with pytest.raises(ConfigError):
        limits.require_memory(ModelConfig())
    (tmp_path / "memory.max").write_text("max\n")
    limits.require_memory(ModelConfig())
