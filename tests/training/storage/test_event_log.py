"""The event log has exactly one line per committed outer iteration."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.files import read_json_lines
from ngsgd.training.coordinator import Coordinator
from ngsgd.training.diagnostics.deferred import DeferredDiagnostics
from ngsgd.training.records import FinalReport, OuterIterationRecord, SubsetScore
from ngsgd.training.storage.event_log import EventLog, is_valid, read_events
from tests.toy import Run


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[OuterIterationRecord]:
    run = Run(tmp_path_factory.mktemp("run"))
    run.train()
    return run.recorder.records


def lines(path: Path) -> Counter[tuple[str, int]]:
    return Counter((event["event"], event.get("outer_iter", -1)) for event in read_events(path))


def test_an_existing_line_is_not_written_again(tmp_path: Path, records: list[OuterIterationRecord]) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.outer_iteration(records[0])
    log.close("KILLED")
    log = EventLog(tmp_path / "events.jsonl", after=0)
    assert log.has(0) and not log.has(1)
    for record in records[:2]:
        log.outer_iteration(record)
    log.close("FINISHED")
    assert lines(tmp_path / "events.jsonl") == {("outer_iteration", 0): 1, ("outer_iteration", 1): 1, ("closed", -1): 2}


def test_lines_after_the_checkpoint_that_is_resumed_are_superseded(tmp_path: Path, records: list[OuterIterationRecord]) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for record in records[:3]:
        log.outer_iteration(record)
    log.close("KILLED")
    # the checkpoint of the last one was damaged, so it is repeated
    log = EventLog(tmp_path / "events.jsonl", after=1)
    log.outer_iteration(records[2])
    log.close("FINISHED")
    found = lines(tmp_path / "events.jsonl")
    assert [found["outer_iteration", number] for number in range(3)] == [1, 1, 1]
    assert found["superseded_outer_iteration", 2] == 1


def test_a_line_without_its_end_is_written_again(tmp_path: Path, records: list[OuterIterationRecord]) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.outer_iteration(records[0])
    # killed before the last byte was written
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    log = EventLog(path, after=0)
    assert not log.has(0)
    log.outer_iteration(records[0])
    log.close("FINISHED")
    assert lines(path) == {("outer_iteration", 0): 1, ("closed", -1): 1}


def test_the_log_of_a_task_has_losses_and_examples_and_is_read_as_any_other(tmp_path: Path,
                                                                           records: list[OuterIterationRecord]) -> None:
    report = FinalReport(None, None, SubsetScore(-1.5, 0.0), SubsetScore(-2.5, 0.0), 640, 3.0, {}, {"valid/objf": 2.5})
    silent = [replace(one, train=replace(one.train, accuracy=0.0), valid=replace(one.valid, accuracy=0.0),
                      jobs=tuple(replace(job, accuracy=0.0) for job in one.jobs)) for one in records[:3]]
    log = EventLog(tmp_path / "events.jsonl", is_speech=False)
    for record in silent:
        log.outer_iteration(record)
    log.finished(report)
    log.close("FINISHED")
    first = read_json_lines(tmp_path / "events.jsonl")[0]
    assert first["valid"] == {"loss": -silent[0].valid.objf} and first["examples_processed"] == silent[0].frames_processed
    assert first["jobs"][0].keys() >= {"loss", "num_examples"} and not first["jobs"][0].keys() & {"objf", "accuracy", "num_frames"}
    *events, finished, _ = read_events(tmp_path / "events.jsonl")
    assert [OuterIterationRecord.from_json(event) for event in events] == silent
    assert FinalReport.from_json(finished) == report
    # the lines of a commit that was lost keep their words, too
    EventLog(tmp_path / "events.jsonl", after=1, is_speech=False).close("FINISHED")
    assert lines(tmp_path / "events.jsonl")["superseded_outer_iteration", 2] == 1
    assert "frames" not in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("damage", [
    {"outer_iter": "x"}, {"outer_iter": None}, {"jobs": 5}, {"jobs": [3]}, {"valid": []}, {"valid": {"objf": "x", "accuracy": 1}},
    {"relative_change": {"a": "b"}}, {"num_jobs": True}, {"train": {}}])
def test_a_line_with_a_value_of_another_type_is_skipped(tmp_path: Path, records: list[OuterIterationRecord],
                                                       damage: dict[str, Any]) -> None:
    line = {"event": "outer_iteration", **json.loads(json.dumps(asdict(records[0])))}
    assert is_valid(line) and not is_valid({**line, **damage})


@pytest.mark.parametrize("line", [{}, {"event": 5}, {"event": "incident"}, {"event": "incident", "message": 3, "outer_iter": 1},
                                  {"event": "finished", "test_errors": 3}, {"event": "closed", "status": None}])
def test_events_without_their_fields_are_skipped(line: dict[str, Any]) -> None:
    assert not is_valid(line)


class Crash(Exception):
    """The process ends here."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the commit", "after the commit", "before the event", "after the event"])
@pytest.mark.parametrize("outer_iter", [0, 1, 2])
def test_a_crash_at_any_moment_leaves_one_line_per_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str,
                                                          outer_iter: int, records: list[OuterIterationRecord]) -> None:
    run = Run(tmp_path)
    path = tmp_path / "events.jsonl"
    with monkeypatch.context() as patched:
        _crash(patched, moment, outer_iter)
        with pytest.raises(Crash):
            _train(run, path)
    _train(run, path)
    assert lines(path) == {("outer_iteration", number): 1 for number in range(run.schedule.num_outer_iters)}
    logged = map(OuterIterationRecord.from_json, read_events(path))
    found, expected = ([(one.train, one.valid, one.diagnostics, one.frames_processed, one.relative_change) for one in run]
                       for run in (logged, records))
    assert found == expected


def _train(run: Run, path: Path) -> None:
    latest, _ = run.store.latest()
    log = EventLog(path, latest.progress.outer_iter if latest else -1)
    run.recorder.records.clear()
    run.recorder.outer_iteration = log.outer_iteration  # type: ignore[method-assign]
    run.train()


def _crash(patched: pytest.MonkeyPatch, moment: str, outer_iter: int) -> None:
    """Ends a run at a moment of one outer iteration; the process does nothing more."""
    commit, pass_on = Coordinator._commit, DeferredDiagnostics._pass_on

    def gone() -> Crash:
        patched.setattr(DeferredDiagnostics, "wait", lambda _: None)
        return Crash()

    def crashing_commit(coordinator: Coordinator, round_: Any, *others: Any) -> Any:
        if round_.plan.outer_iter != outer_iter:
            return commit(coordinator, round_, *others)
        if moment == "after the commit":
            commit(coordinator, round_, *others)
        raise gone()

    def crashing_pass_on(records: DeferredDiagnostics, record: Any, diagnosis: Any) -> None:
        if record.outer_iter != outer_iter:
            return pass_on(records, record, diagnosis)
        if moment == "after the event":
            pass_on(records, record, diagnosis)
        raise gone()
    if moment.endswith("commit"):
        patched.setattr(Coordinator, "_commit", crashing_commit)
    else:
        patched.setattr(DeferredDiagnostics, "_pass_on", crashing_pass_on)
