"""Figures of a run become metrics of Ray, and a run without an address has none."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ngsgd.config import ClusterConfig, RunConfig, TrackingConfig
from ngsgd.launcher.commands.train import services_of
from ngsgd.launcher.mlflow.metrics import run_metrics
from ngsgd.launcher.ray import metrics
from tests.launcher.records import final_report, job, outer_iteration


def tracker(*, is_speech: bool) -> metrics.RayMetrics:
    return metrics.RayMetrics("night", lambda record, before_s: run_metrics(record, is_speech=is_speech, before_s=before_s))


# (name, tags) -> value
Recorded = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The metrics of a test, without a cluster."""
    found: Recorded = Counter()  # type: ignore[assignment]

    class Metric:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert re.fullmatch(r"[a-zA-Z_]\w*", name) and description
            self.name, self.tag_keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self.tag_keys and isinstance(value, float)
            found[self.name, tuple(tags.items())] = value

    monkeypatch.setattr(metrics, "Gauge", Metric)
    monkeypatch.setattr(metrics, "GAUGES", {})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return found


@pytest.mark.entry("Nc17")
@pytest.mark.parametrize("is_speech", [True, False])
def test_every_figure_of_mlflow_is_a_metric_of_ray(is_speech: bool, recorded: Recorded) -> None:
    jobs = (replace(job(), health={"layer/limited": 0.25}),)
    record = replace(outer_iteration(2, jobs=jobs), diagnostics={"valid/my metric": 0.5})
    figures = run_metrics(record, is_speech=is_speech, before_s=0.0)
    assert len({metrics.exported(name) for name in figures}) == len(figures) > 20
    tracker(is_speech=is_speech).outer_iteration(record)
    assert recorded == {(metrics.exported(name), (("run", "night"),)): value for name, value in figures.items()}
    objective = "ngsgd_objf_valid" if is_speech else "ngsgd_loss_valid"
    names = {name for name, _ in recorded}
    assert {objective, "ngsgd_workers_participation", "ngsgd_workers_alive", "ngsgd_time_average_s"} <= names


@pytest.mark.entry("Nc17")
def test_the_result_is_shown_and_figures_that_are_not_known_are_not(recorded: Recorded) -> None:
    shown = tracker(is_speech=True)
    shown.outer_iteration(outer_iteration(jobs=(job(accepted=False),), valid_objf=math.nan))
    assert recorded and ("ngsgd_objf_valid", (("run", "night"),)) not in recorded
    report = final_report()
    shown.finished(report)
    assert report.test_errors and recorded["ngsgd_wer_test", (("run", "night"),)] == report.test_errors.wer


@pytest.mark.entry("Nc17")
def test_a_lost_cluster_costs_no_error(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    tracker(is_speech=True).outer_iteration(outer_iteration())
    assert not recorded


@pytest.mark.entry("Nc17")
@pytest.mark.parametrize(("cluster", "number"), [
    (ClusterConfig("ray", address="head:6379"), 1), (ClusterConfig("ray"), 0), (ClusterConfig(), 0)])
def test_a_cluster_that_was_joined_gets_the_metrics(cluster: ClusterConfig, number: int, tmp_path: Any) -> None:
    config = RunConfig(cluster=cluster, tracking=TrackingConfig(kind="none"))
    trackers = services_of(config, quiet=True).make_trackers(config, SimpleNamespace(path=tmp_path))  # type: ignore[arg-type]
    assert [type(one) for one in trackers].count(metrics.RayMetrics) == number
