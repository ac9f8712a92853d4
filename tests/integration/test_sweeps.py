"""`ngsgd train -m` by each launcher and sweeper that docs/tuning.md names: every run is made, in
its own folder, and reported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ngsgd.launcher.commands.info import state_of
from ngsgd.word_errors import WordErrors
from tests.integration.service import Service

pytestmark = pytest.mark.slow

_COMMON = ["cluster=in_process", "schedule.num_epochs=1", "cluster.num_workers=1"]
_LAUNCHERS = {
    # joblib is that of the sweep with a run that fails, basic that of Optuna, below
    "submitit_local": ["hydra.launcher.timeout_min=5"],
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(tmp_path_factory.mktemp("sweeps"))


@pytest.mark.parametrize("launcher", _LAUNCHERS)
def test_a_launcher_makes_every_run_of_a_sweep(launcher: str, service: Service) -> None:
    done = service.call("-m", f"hydra/launcher={launcher}", *_LAUNCHERS[launcher], f"name={launcher}", "seed=0,1", *_COMMON)
    assert done.returncode == 0, done.stderr
    states = [state_of(run) for run in service.runs(launcher)]
    assert [state["state"] for state in states] == ["SUCCEEDED"] * 2
    seeds = sorted(yaml.safe_load((Path(state["run"]) / "config.yaml").read_text())["seed"] for state in states)
    assert seeds == [0, 1]


def test_a_run_that_fails_does_not_stop_the_others_and_its_exit_code_is_that_of_the_sweep(service: Service) -> None:
    done = service.call("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "name=half", "seed=0", *_COMMON,
                        "recipe=digits,fsdd", "data.source=")
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert len(service.runs("half")) == 1


def test_optuna_minimizes_the_wer_of_the_held_out_set(service: Service) -> None:
    done = service.call("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.direction=minimize", "name=optuna",
                        "schedule.lr_initial=tag(log,interval(0.004,0.02))", *_COMMON)
    assert done.returncode == 0, done.stderr
    runs = service.runs("optuna")
    assert len(runs) == 2
    [found] = (service.output_dir / "sweeps").glob("*/optimization_results.yaml")
    best = yaml.safe_load(found.read_text())
    wers = {yaml.safe_load((run / "config.yaml").read_text())["schedule"]["lr_initial"]: _valid_wer(run) for run in runs}
    assert best["best_value"] == min(wers.values())
    assert wers[best["best_params"]["schedule.lr_initial"]] == best["best_value"]


def _valid_wer(run: Path) -> float:
    import json

    return WordErrors.of_json(json.loads((run / "decode" / "wer.json").read_text())["valid"]).wer
