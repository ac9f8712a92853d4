"""The state of a run, from its event log."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import info
from ngsgd.training.event_log import EventLog
from ngsgd.training.records import Incident
from tests.launcher.records import final_report, outer_iteration


@pytest.mark.parametrize(("status", "state"), [("FINISHED", "SUCCEEDED"), ("KILLED", "STOPPED"), ("FAILED", "FAILED")])
def test_a_run_that_ended(tmp_path: Path, status: str, state: str) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.outer_iteration(outer_iteration())
    log.incident(Incident("worker_died", "worker 1 died.", 11))
    log.finished(final_report())
    log.close(status)
    lines = info.describe_run(tmp_path)
    assert lines[1] == f"state      {state}"
    assert lines[2] == "progress   iter 12/40, epoch 1.20/4, 384000 frames, valid objf -1.920, accuracy 61.2%"
    assert lines[3] == "result     %WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]"
    assert lines[-1] == "  ! worker 1 died."


def test_a_run_that_goes_on_or_was_lost(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.outer_iteration(outer_iteration())
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "outer_it')  # cut short by a kill
    assert info.describe_run(tmp_path)[1].startswith("state      RUNNING, or lost")


def test_a_run_without_events(tmp_path: Path) -> None:
    assert info.describe_run(tmp_path)[1] == "state      PENDING (no event yet)"


def test_versions_name_the_package() -> None:
    assert info.versions()[0].startswith("ngsgd ")
