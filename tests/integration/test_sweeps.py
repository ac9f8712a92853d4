"""`ngsgd train -m` by each launcher and sweeper that docs/tuning.md names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ngsgd.launcher.commands.info import state_of
from ngsgd.word_errors import WordErrors
from tests.integration.service import Service

pytestmark = pytest.mark.slow

_COMMON = ["cluster=in_process", "schedule.num_epochs=1", "cluster.num_workers=1"]


# joblib is the launcher of the sweep with a run that fails, basic that of Optuna, below
@pytest.mark.entry("H28", "`-m` with `hydra/launcher=joblib`, `submitit_local`, `submitit_slurm` or `hydra/sweeper=optuna`",
                   "works", "`pip install 'ngsgd[sweep]'`; each run has its folder and exit code, and Optuna minimizes the WER of "
                   "the validation set. submitit is tested without Slurm")
def test_a_launcher_makes_every_run_of_a_sweep(service: Service) -> None:
    service.output("-m", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5",
                   "name=slurm", "seed=0,1", *_COMMON)
    states = [state_of(run) for run in service.runs("slurm")]
    assert [state["state"] for state in states] == ["SUCCEEDED"] * 2
    seeds = sorted(yaml.safe_load((Path(state["run"]) / "config.yaml").read_text())["seed"] for state in states)
    assert seeds == [0, 1]


@pytest.mark.entry("H28")
def test_a_run_that_fails_does_not_stop_the_others_and_its_exit_code_is_that_of_the_sweep(service: Service) -> None:
    done = service.call("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "name=half", "seed=0", *_COMMON,
                        "recipe=digits,fsdd", "data.source=")
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert len(service.runs("half")) == 1


@pytest.mark.entry("H28")
def test_optuna_minimizes_the_wer_of_the_held_out_set(service: Service) -> None:
    service.output("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "name=optuna",
                   "hydra.sweeper.direction=minimize",
                   "schedule.lr_initial=tag(log,interval(0.004,0.02))", *_COMMON)
    runs = service.runs("optuna")
    assert len(runs) == 2
    [found] = (service.output_dir / "sweeps").glob("*/optimization_results.yaml")
    best = yaml.safe_load(found.read_text())
    wers = {}
    for run in runs:
        rate = yaml.safe_load((run / "config.yaml").read_text())["schedule"]["lr_initial"]
        found_wers = json.loads((run / "decode" / "wer.json").read_text())
        wers[rate] = WordErrors.of_json(found_wers["valid"]).wer
    assert best["best_value"] == min(wers.values())
    assert wers[best["best_params"]["schedule.lr_initial"]] == best["best_value"]
