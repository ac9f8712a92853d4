"""`ngsgd train -m` in MLflow: a parent run with the runs of the sweep."""

from __future__ import annotations

import pytest
from mlflow import MlflowClient

from ngsgd.launcher.mlflow.store import read_tracking
from tests.integration.service import Service

pytestmark = pytest.mark.slow


def test_the_runs_of_a_sweep_are_children_of_one_run(service: Service) -> None:
    uri = f"sqlite:///{service.output_dir}/sweeps.db"
    service.output("-m", "name=swept", "seed=0,1", "cluster=in_process", "cluster.num_workers=1", "tracking.kind=mlflow",
                   f"tracking.uri={uri}", "tracking.experiment_name=sweeps")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("sweeps")
    assert experiment is not None
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    children = {read_tracking(run)["run_id"] for run in service.runs("swept")}
    [parent] = runs.keys() - children
    assert len(children) == 2 and {runs[one].data.tags["mlflow.parentRunId"] for one in children} == {parent}
    assert {runs[one].data.params["seed"] for one in children} == {"0", "1"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
