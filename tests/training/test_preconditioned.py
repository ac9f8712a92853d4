"""Runs with a preconditioner: every method, and each policy for its curvature."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ngsgd.config import ClusterConfig, OptimizerConfig, RunConfig, ScheduleConfig, check, choices_of, unused, unused_in
from ngsgd.config.sections.optimizer import EVERY_MINIBATCH, WITHOUT_MEAN
from ngsgd.errors import RunInterrupted
from ngsgd.preconditioners import METHODS
from ngsgd.preconditioners.build import make_preconditioner
from tests.toy import Run, StopAfter, config, undisturbed


def used_by(kind: Any) -> set[str]:
    """The settings that a method uses."""
    section = OptimizerConfig(kind)
    return {spec.name for spec in fields(section)} - {setting.path for setting in unused_in(section)}


def preconditioned(kind: Any, num_jobs: int = 4, **options: Any) -> RunConfig:
    """The configuration of a run of a second or two."""
    used = used_by(kind)
    options = {**{name: 2 for name in ("curvature_interval", "inverse_interval") if name in used}, **options}
    return config(optimizer=OptimizerConfig(kind, **options),
                  cluster=ClusterConfig(num_workers=num_jobs, threads_per_worker=1),
                  schedule=ScheduleConfig(num_epochs=1.0, minibatch_size=64, lr_initial=0.01, lr_final=0.001,
                                          num_jobs_initial=num_jobs, num_jobs_final=num_jobs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_four_jobs_learn_with_every_method_and_hand_its_curvature_on(kind: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, preconditioned(kind, curvature_state="keep" if kind in WITHOUT_MEAN else "average"))
    run.train()
    records = run.recorder.records
    assert all(record.num_accepted == record.num_jobs for record in records)
    assert records[-1].objf > records[0].objf > -3.0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "averaging"), [
    ("ngsgd", "keep"), *itertools.product(["ekfac", "kbfgs", "soap"], ["keep", "average"])])
def test_kept_and_averaged_curvature_survive_a_resume_and_change_the_run(kind: Any, averaging: str, tmp_path: Path) -> None:
    draws = {"fisher": "mc"} if "fisher" in used_by(kind) else {}
    settings = preconditioned(kind, 2, curvature_state=averaging, **draws)
    whole = undisturbed(settings)
    run = Run(tmp_path / "stopped", settings)
    with pytest.raises(RunInterrupted):
        run.train(stop=StopAfter(1, at_once=False))
    assert run.train().model_sha256 == whole.model_sha256
    fresh = Run(tmp_path / "reset", preconditioned(kind, 2, curvature_state="reset", **draws)).train()
    assert fresh.model_sha256 != whole.model_sha256


def test_options_of_another_schedule_are_reported() -> None:
    def not_used(**options: Any) -> set[str]:
        return {one.path for one in unused(RunConfig(schedule=ScheduleConfig(**options))) if one.is_set}
    assert not_used(lr_schedule="cosine", lr_factors=(1.0, 2.0)) == {"schedule.lr_factors"}
    assert not_used(lr_schedule="cosine", lr_final=0.001, warm_up=0.1) == set()


def test_the_configuration_has_all_methods_and_rejects_invalid_combinations() -> None:
    assert choices_of(OptimizerConfig, "kind") == ("ngsgd", "sgd", *METHODS)
    assert {kind for kind in METHODS if not METHODS[kind].traits.has_mean} == set(WITHOUT_MEAN)
    assert {kind for kind in METHODS if METHODS[kind].traits.every_step} == set(EVERY_MINIBATCH)
    for kind in METHODS:
        make_preconditioner(nn.Linear(2, 2), preconditioned(kind).optimizer, seed=0)
        assert not check(preconditioned(kind)) and not [setting for setting in unused(preconditioned(kind)) if setting.is_set]
    for kind in WITHOUT_MEAN:
        [problem] = check(preconditioned(kind, curvature_state="average"))
        assert problem.startswith("optimizer.curvature_state is average")
