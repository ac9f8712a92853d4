"""Participation, effective training time, cost and averages over sites, from events."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import ngsgd
from ngsgd.launcher import cli
from ngsgd.launcher.mlflow.metrics import run_metrics
from ngsgd.launcher.reports.efficiency import efficiency_of, of_record, sites_of
from ngsgd.launcher.reports.progress import final_lines
from ngsgd.pipeline.services import Services
from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.storage.event_log import read_events
from tests.launcher.records import final_report, job, outer_iteration
from tests.tasks import blobs

FIGURES = {"round": 2.0, "averages": 1.0, "counted": 1.0, "possible": 2.0, "missed": 1.0,
           "wait_s": 3.0, "sent_bytes": 2e6, "received_bytes": 5e6}


def _event(record: Any) -> dict[str, Any]:
    return {"event": "outer_iteration", **asdict(record)}


def test_contributions_and_seconds_are_summed_over_the_run() -> None:
    jobs = (job(), job(number=1, worker=1, accepted=False), job(number=2, worker=2))
    first = replace(outer_iteration(0, jobs=jobs), elapsed_s=4.0)
    second = replace(outer_iteration(1), elapsed_s=10.0, workers_alive=2)
    found = efficiency_of([_event(first), {"event": "incident"}, _event(second)])
    assert (found.num_counted, found.num_possible, found.num_workers) == (4, 5, 3)
    # four counted jobs of 2 s, on three workers for 10 s
    assert found.participation == pytest.approx(0.8) and found.effective_share == pytest.approx(8.0 / 30.0)


def test_cost_counts_the_workers_of_each_outer_iteration_and_process() -> None:
    first = replace(outer_iteration(0), elapsed_s=1800.0, workers_alive=4)
    # another process, whose time begins again
    second = replace(outer_iteration(1), elapsed_s=900.0, workers_alive=2)
    found = efficiency_of([_event(first), _event(second)])
    assert (found.wall_s, found.worker_s) == (2700.0, 1800.0 * 4 + 900.0 * 2)
    assert found.cost(0.5) == pytest.approx(1.25)
    # frames of 10 ms
    audio_h = found.num_samples * 0.01 / 3600
    assert found.cost_text(0.5, is_speech=True).startswith(f"1.25, {1.25 / audio_h:.3g} per hour")
    assert found.cost_text(0.5, is_speech=False).startswith(f"1.25, {1.25 / (found.num_samples / 1e6):.3g} per million")


def test_a_run_without_an_outer_iteration_has_no_share() -> None:
    none = efficiency_of([])
    assert none.participation != none.participation and none.effective_share != none.effective_share


def test_mlflow_has_both_figures_of_each_outer_iteration() -> None:
    figures = run_metrics(replace(outer_iteration(1), elapsed_s=10.0), before_s=6.0)
    one = of_record(replace(outer_iteration(1), elapsed_s=10.0), 6.0)
    assert figures["workers/participation"] == one.participation == 1.0
    # two jobs of 2 s on two workers for 4 s
    assert figures["workers/effective_training_time"] == one.effective_share == pytest.approx(0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ngsgd.train(blobs.make_task, output_dir=tmp_path_factory.mktemp("runs"), services=Services(), num_epochs=1,
                         batch_size=16, cluster="in_process").folder
    return folder.path


def test_the_console_summary_and_the_report_have_both_figures(run: Path) -> None:
    report = replace(final_report(), files={"run folder": str(run), "events": str(run / "events.jsonl")})
    found = efficiency_of(read_events(run / "events.jsonl"))
    assert any(found.text in line for line in final_lines(report))
    assert cli.main(["report", str(run), "--quiet"]) == 0
    page = (run / "report.html").read_text()
    assert "participation" in page and f"{100 * found.effective_share:.3g}%" in page


def test_figures_are_summed_over_the_averages() -> None:
    plain, other = outer_iteration(0), replace(outer_iteration(1), sites=FIGURES)
    last = replace(outer_iteration(2), sites={**FIGURES, "counted": 2.0, "missed": 0.0})
    found = sites_of([_event(plain), _event(other), {"event": "incident"}, _event(last)])
    assert (found.num_rounds, found.num_counted, found.num_possible) == (2, 3, 4)
    assert (found.sent_mb, found.received_mb, found.wait_s) == pytest.approx((4.0, 10.0, 6.0))
    assert found.participation == pytest.approx(0.75) and "10 MB" in found.text
    assert sites_of([_event(plain)]).num_rounds == 0


def test_mlflow_has_the_figures_of_iterations_with_an_average_only() -> None:
    assert not [name for name in run_metrics(outer_iteration(0)) if name.startswith("sites/")]
    found = run_metrics(replace(outer_iteration(1), sites=FIGURES))
    assert {name: value for name, value in found.items() if name.startswith("sites/")} == {
        "sites/counted": 1.0, "sites/missed": 1.0, "sites/wait_s": 3.0, "sites/sent_mb": 2.0, "sites/received_mb": 5.0}
    record = replace(outer_iteration(1), sites=FIGURES)
    assert OuterIterationRecord.from_json(asdict(record)).sites == FIGURES
