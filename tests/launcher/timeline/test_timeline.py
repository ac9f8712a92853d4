"""Participation, effective training time and the trace, against the events of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ngsgd
from ngsgd.launcher import cli
from ngsgd.launcher.mlflow.metrics import run_metrics
from ngsgd.launcher.reports.progress import final_lines
from ngsgd.launcher.timeline.efficiency import efficiency_of, of_record
from ngsgd.pipeline.services import Services
from ngsgd.training.records import NOT_THE_BEST, Incident
from ngsgd.training.storage.event_log import EventLog, read_events
from tests.launcher.records import final_report, job, outer_iteration
from tests.tasks import blobs

_US = 1e6


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


def test_a_job_that_is_not_averaged_by_design_was_no_possible_contribution() -> None:
    best = (job(), replace(job(number=1, accepted=False), reason=NOT_THE_BEST))
    assert efficiency_of([_event(outer_iteration(0, jobs=best))]).participation == 1.0


def test_no_outer_iteration_has_no_participation() -> None:
    found = efficiency_of([])
    assert found.participation != found.participation and found.effective_share != found.effective_share


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
    log = EventLog(folder.events, is_speech=False)
    log.incident(Incident("worker_died", "worker 1 died in the test", 1, 1, 1, elapsed_s=0.25))
    log.close("FINISHED")
    return folder.path


def test_the_trace_has_the_times_of_the_events(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["report", str(run), "--trace", str(path)]) == 0
    trace, events = json.loads(path.read_text())["traceEvents"], read_events(run / "events.jsonl")
    iterations = [event for event in events if event["event"] == "outer_iteration"]
    names = {one["tid"]: one["args"]["name"] for one in trace if one["name"] == "thread_name"}
    spans = [one for one in trace if one["ph"] == "X"]
    jobs = {(names[one["tid"]], one["args"]["outer_iter"], one["args"]["job"]): one for one in spans if "job" in one["args"]}
    wanted = {(f"worker {job['worker']}", event["outer_iter"], job["job"]): job for event in iterations for job in event["jobs"]}
    assert jobs.keys() == wanted.keys() and len(jobs) > 8
    for key, one in jobs.items():
        assert one["ts"] + one["dur"] == pytest.approx(_US * wanted[key]["ended_s"])
        assert one["dur"] == pytest.approx(_US * wanted[key]["seconds"])
    for event in iterations:
        phases = {one["name"]: one for one in spans if one["tid"] == 0 and one["args"]["outer_iter"] == event["outer_iter"]}
        assert {name: one["dur"] for name, one in phases.items()} == pytest.approx({
            "jobs": _US * event["compute_s"], "averaging": _US * event["average_s"], "evaluation": _US * event["diagnostics_s"],
            "checkpoint": _US * event["checkpoint_s"]})
        assert phases["checkpoint"]["ts"] == pytest.approx(_US * event["elapsed_s"])


def test_spans_of_a_track_do_not_overlap_and_jobs_lie_in_their_phase(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["report", str(run), "--trace", str(path)]) == 0
    spans = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    # clocks of different resolution: 1 ms
    slack_us = 1000.0
    for track in {one["tid"] for one in spans}:
        mine = sorted((one for one in spans if one["tid"] == track), key=lambda one: float(one["ts"]))
        assert all(before["ts"] + before["dur"] <= after["ts"] + slack_us for before, after in pairwise(mine))
    phases = {one["args"]["outer_iter"]: one for one in spans if one["name"] == "jobs"}
    for one in spans:
        if "job" in one["args"]:
            phase = phases[one["args"]["outer_iter"]]
            assert one["ts"] >= phase["ts"] - slack_us and one["ts"] + one["dur"] <= phase["ts"] + phase["dur"] + slack_us


def test_faults_are_instants_of_their_worker(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["report", str(run), "--trace", str(path)]) == 0
    instants = {one["name"]: one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "i"}
    died = instants["worker_died"]
    assert died["tid"] == 2 and died["ts"] == pytest.approx(0.25 * _US) and died["s"] == "t"
    assert instants.keys() >= {"opened", "closed"}


def test_the_console_summary_and_the_report_have_both_figures(run: Path) -> None:
    report = replace(final_report(), files={"run folder": str(run), "events": str(run / "events.jsonl")})
    found = efficiency_of(read_events(run / "events.jsonl"))
    assert any(found.text in line for line in final_lines(report))
    assert cli.main(["report", str(run), "--quiet"]) == 0
    page = (run / "report.html").read_text()
    assert "participation" in page and f"{100 * found.effective_share:.3g}%" in page
