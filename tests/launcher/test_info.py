"""The state of a run, from its event log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher import info
from launcher.run_folder import RunFolder
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
    lines = info.describe_run(info.state_of(tmp_path))
    assert lines[1] == f"state      {state}"
    assert lines[2] == "progress   iter 12/40, epoch 1.20/4, 384000 frames, valid objf -1.920, accuracy 61.2%"
    assert lines[3] == "result     %WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]"
    assert lines[-1] == "  ! worker 1 died."


def test_a_run_that_goes_on_or_was_lost(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.outer_iteration(outer_iteration())
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "outer_it')  # cut short by a kill
    assert info.describe_run(info.state_of(tmp_path))[1].startswith("state      LOST: its process is gone")


def test_a_run_without_events(tmp_path: Path) -> None:
    assert info.describe_run(info.state_of(tmp_path))[1] == "state      PENDING (no event yet)"


def test_a_run_that_this_machine_trains_is_running(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").outer_iteration(outer_iteration())
    with RunFolder(tmp_path).marked_as_running():
        state = info.state_of(tmp_path)
        assert (state["state"], state["process"]["process_id"]) == ("RUNNING", os.getpid())
    assert info.state_of(tmp_path)["state"] == "LOST"


def test_versions_name_the_package_and_can_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert info.command([]) == 0
    assert capsys.readouterr().out.startswith("ngsgd ")
    assert info.command(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["torch"]
