"""Figures of the averages over sites, in console, MLflow and report."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from ngsgd.launcher.mlflow.metrics import run_metrics
from ngsgd.launcher.timeline.sites import sites_of
from ngsgd.training.records import OuterIterationRecord
from tests.launcher.records import outer_iteration

FIGURES = {"round": 2.0, "averages": 1.0, "counted": 1.0, "possible": 2.0, "missed": 1.0, "wait_s": 3.0, "sent_bytes": 2e6,
           "received_bytes": 5e6}


def _event(record: OuterIterationRecord) -> dict[str, Any]:
    return {"event": "outer_iteration", **asdict(record)}


def test_figures_are_summed_over_the_averages() -> None:
    plain, other = outer_iteration(0), replace(outer_iteration(1), sites=FIGURES)
    last = replace(outer_iteration(2), sites={**FIGURES, "counted": 2.0, "missed": 0.0})
    found = sites_of([_event(plain), _event(other), {"event": "incident"}, _event(last)])
    assert (found.num_rounds, found.num_counted, found.num_possible, found.num_missed) == (2, 3, 4, 1)
    assert (found.sent_mb, found.received_mb, found.wait_s) == pytest.approx((4.0, 10.0, 6.0))
    assert found.participation == pytest.approx(0.75) and "10 MB" in found.text
    assert sites_of([_event(plain)]).num_rounds == 0


def test_mlflow_has_the_figures_of_iterations_with_an_average_only() -> None:
    assert not [name for name in run_metrics(outer_iteration(0)) if name.startswith("sites/")]
    found = run_metrics(replace(outer_iteration(1), sites=FIGURES))
    assert {name: value for name, value in found.items() if name.startswith("sites/")} == {
        "sites/counted": 1.0, "sites/missed": 1.0, "sites/wait_s": 3.0, "sites/sent_mb": 2.0, "sites/received_mb": 5.0}


def test_records_are_read_back() -> None:
    record = replace(outer_iteration(1), sites=FIGURES)
    assert OuterIterationRecord.from_json(asdict(record)).sites == FIGURES
