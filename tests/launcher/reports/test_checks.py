"""Checks of a run's health: every color of each, the verdict, the expected results."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import RunConfig
from ngsgd.launcher.reports.checks import checks_of, user_settings, verdict_of
from ngsgd.launcher.reports.history import RunHistory
from ngsgd.pipeline.recipes import expected_wer, recipe
from ngsgd.training.records import FinalReport, Incident, JobRecord, OuterIterationRecord, SubsetScore
from tests.launcher.records import final_report, job, outer_iteration

RECIPES = Path(__file__).parents[3] / "recipes"


def record(number: int, objf: float, *jobs: JobRecord, **changed: Any) -> OuterIterationRecord:
    found = outer_iteration(number, num_outer_iters=4, valid_objf=objf, jobs=jobs)
    return replace(found, train=SubsetScore(objf, 0.6), elapsed_s=3.0 * (number + 1), **changed)


def history(*records: OuterIterationRecord, incidents: tuple[Incident, ...] = (),
            final: FinalReport | None = None, state: str = "SUCCEEDED",
            config: RunConfig | None = None, **others: Any) -> RunHistory:
    events: list[dict[str, Any]] = []
    for one in records or (record(0, -2.0), record(1, -1.0)):
        share = {"max_change_share": one.max_change_share}
        events.append({"event": "outer_iteration", **asdict(one), **share})
    events += [{"event": "incident", **asdict(one)} for one in incidents]
    events += [{"event": "finished", **asdict(final)}] if final else []
    about = {"state": state, "outer_iter": len(records), "num_outer_iters": 4, "run": "runs/x",
             "resume": "ngsgd resume runs/x", "error": {}}
    return RunHistory("x", config or RunConfig(), events, about, **others)


def levels(run: RunHistory) -> dict[str, str]:
    return {check.name: check.level for check in checks_of(run)}


def verdict(run: RunHistory) -> str:
    return verdict_of(run, checks_of(run)).word


def test_a_run_without_a_fault_is_healthy() -> None:
    run = history(final=replace(final_report(), valid=SubsetScore(-1.0, 0.7)))
    assert {"red", "amber"}.isdisjoint(levels(run).values())
    assert verdict(run) == "healthy"


def test_a_run_is_judged_while_it_trains_and_before_its_first_outer_iteration() -> None:
    assert levels(history(state="RUNNING"))["Run"] == "gray"
    assert verdict(history(state="RUNNING")) == "healthy"
    failed = replace(history(state="FAILED"), events=[{"event": "closed", "status": "FAILED"}])
    assert levels(failed) == {"Run": "red"}
    assert verdict(failed) == "failed"


@pytest.mark.parametrize(("objfs", "level"), [
    ((-2.0, -1.0), "green"), ((-2.0, -1.0, -1.05), "green"), ((-2.0, -1.0, -1.5), "amber"),
    ((-2.0, -1.0, -2.0), "red"), ((-2.0, -1.0, -2.5), "red"), ((-1.0, -2.0), "red"), ((-2.0,), "gray")])
def test_the_objective_must_rise_and_stay(objfs: tuple[float, ...], level: str) -> None:
    run = history(*(record(number, objf) for number, objf in enumerate(objfs)))
    assert levels(run)["Objective"] == level
    assert (verdict(run) == "failed") == (level == "red")


def test_a_score_that_is_not_finite_fails_and_a_skipped_minibatch_is_shown() -> None:
    broken = history(record(0, -2.0), record(1, math.nan))
    assert levels(broken)["NaN and infinity"] == "red"
    assert verdict(broken) == "failed"
    skipped = history(record(0, -2.0), record(1, -1.0, replace(job(), num_skipped=1)))
    assert levels(skipped)["NaN and infinity"] == "amber"
    assert verdict(skipped) == "look at"


@pytest.mark.parametrize(("valid", "level"), [(-0.9, "green"), (-1.2, "green"), (-1.5, "amber"), (-2.0, "red")])
def test_the_gap_is_that_of_the_final_model(valid: float, level: str) -> None:
    final = replace(final_report(), train=SubsetScore(-1.0, 0.7), valid=SubsetScore(valid, 0.6))
    run = history(record(0, -9.0), record(1, -8.0), final=final)
    assert levels(run)["Train/validation gap"] == level


@pytest.mark.parametrize(("valid", "level"), [(-0.3, "green"), (-0.6, "red")])
def test_the_ratio_of_two_losses_near_0_is_not_judged(valid: float, level: str) -> None:
    final = replace(final_report(), train=SubsetScore(-0.01, 1.0), valid=SubsetScore(valid, 1.0))
    assert levels(history(record(0, -9.0), record(1, -0.5), final=final))["Train/validation gap"] == level


@pytest.mark.parametrize(("share", "level"), [(0.1, "green"), (0.6, "amber"), (0.95, "red")])
def test_clipping_counts_in_the_second_half(share: float, level: str) -> None:
    early = replace(job(), max_change_share=1.0)
    run = history(record(0, -2.0, early), record(1, -1.0, replace(job(), max_change_share=share)))
    assert levels(run)["Clipped updates"] == level


@pytest.mark.parametrize(("share", "level"), [(0.0, "green"), (0.2, "amber"), (0.6, "red")])
def test_dead_units_are_those_of_the_worst_layer(share: float, level: str) -> None:
    units = {"dead_units/one": 0.0, "dead_units/two": share}
    run = history(record(0, -2.0), record(1, -1.0, diagnostics=units))
    assert levels(run)["Dead ReLUs"] == level


@pytest.mark.parametrize(("seconds", "level"), [(2.2, "green"), (3.0, "amber"), (9.0, "red")])
def test_a_slow_worker_is_named(seconds: float, level: str) -> None:
    jobs = [replace(job(number=n, worker=n), seconds=2.0) for n in range(4)]
    jobs.append(replace(job(number=4, worker=4), seconds=seconds))
    run = history(record(0, -2.0, *jobs))
    assert levels(run)["Speed of workers"] == level
    assert run.workers()[0].worker == 4


def test_faults_and_rejected_jobs() -> None:
    died = history(incidents=(Incident("worker_died", "m", 1, 0, 1, 2.0),))
    assert levels(died)["Faults"] == "amber"
    assert [row.num_failed for row in sorted(died.workers(), key=lambda row: row.worker)] == [0, 1]
    assert levels(history(incidents=(Incident("job_dropped", "m", 1),)))["Faults"] == "red"
    rejected = (Incident("job_rejected", "m", 1),)
    assert levels(history(incidents=rejected))["Rejected jobs"] == "red"
    many = [record(number, -2.0 + number / 10) for number in range(10)]
    assert levels(history(*many, incidents=rejected))["Rejected jobs"] == "amber"


def test_a_stop_is_found_in_the_ledger_and_its_kind_in_the_log() -> None:
    ledger = [{"event": "started", "after": after} for after in (-1, 0, 1)]
    run = history(record(0, -2.0), record(1, -1.5), record(2, -1.0), ledger=ledger)
    events = list(run.events)
    events.insert(1, {"event": "closed", "status": "KILLED"})
    stops = replace(run, events=events).stops()
    found = [(stop.outer_iter, stop.elapsed_s, stop.is_clean) for stop in stops]
    assert found == [(0, 3.0, True), (1, 6.0, False)]
    assert levels(replace(run, events=events))["Interruptions"] == "amber"
    without = replace(run, events=events, ledger=())
    assert [stop.outer_iter for stop in without.stops()] == [0]
    assert levels(without)["Interruptions"] == "green"


@pytest.mark.parametrize(("interval", "level"), [((1.5, 3.2), "green"), ((2.6, 4.0), "amber"), ((4.0, 6.0), "red")])
def test_the_wer_is_compared_with_that_of_the_recipe(interval: tuple[float, float], level: str) -> None:
    run = history(final=final_report(), config=recipe("digits", seed=3), interval=interval)
    assert levels(run)["WER"] == level
    other = recipe("digits", schedule={"num_epochs": 1.0})
    assert levels(replace(run, config=other))["WER"] == "gray"


def test_settings_are_those_that_the_user_chose() -> None:
    config = recipe("fsdd_robust", optimizer={"kind": "sgd"}, cluster={"num_workers": 4})
    name, changed = user_settings(config)
    assert name == "fsdd_robust"
    chosen = {"optimizer.kind": "sgd", "cluster.num_workers": 4}
    assert {path: value for path, (value, _) in changed.items() if "tracking" not in path} == chosen


EXPECTED = [(name, optimizer, wer) for name in ("an4", "digits", "fsdd", "yesno")
            for optimizer, wer in expected_wer(name).items()]


@pytest.mark.parametrize(("name", "optimizer", "expected"), EXPECTED)
def test_expected_results_are_those_of_the_tables(name: str, optimizer: str, expected: float) -> None:
    text = (RECIPES / name / "RESULTS.md").read_text(encoding="utf-8")
    # rows of the first table that have this optimizer, or of a table without that column
    rows = [one for one in text.splitlines() if re.match(rf"\| ({optimizer} \| )?[012] \|", one)]
    found = [float(re.findall(r"%WER (\S+)", row)[1]) for row in rows[:3]]
    assert sum(found) / 3 == pytest.approx(expected, abs=0.006)
