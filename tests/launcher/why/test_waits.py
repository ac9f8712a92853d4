"""`ngsgd why` about a run that trains, after a fault: it has recovered, or it waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import RunConfig
from ngsgd.launcher.why.explain import explain
from ngsgd.runs import config_file
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.records import Incident
from ngsgd.training.storage.event_log import EventLog

LOST = {"event": "failed", "outer_iter": 3, "job": 0, "attempt": 1, "worker": 1, "reason": "killed by SIGKILL", "kind": "killed"}
AGAIN = {"event": "submitted", "outer_iter": 3, "job": 0, "attempt": 2}
ACCEPTED = {**AGAIN, "event": "accepted"}


def planned(outer_iter: int) -> dict[str, Any]:
    return {"event": "planned", "outer_iter": outer_iter, "job": 0}


def committed(outer_iter: int) -> dict[str, Any]:
    return {"event": "committed", "outer_iter": outer_iter}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunFolder]:
    config = RunConfig(output_dir=str(tmp_path), name="waits")
    folder = RunFolder.create(config, config_file.to_yaml(config))
    with folder.marked_as_running():
        events = EventLog(folder.events)
        events.opened("train")
        events.incident(Incident("worker_died", "worker 1 died", 3, 0, 1))
        yield folder


@pytest.mark.parametrize(("ledger", "wait"), [
    ([planned(3), LOST], "waits"), ([planned(3), LOST, AGAIN], "repeats"), ([planned(3), LOST, AGAIN, ACCEPTED], "recovered"),
    # another worker got a job since
    ([planned(3), LOST, AGAIN, {**AGAIN, "job": 1}], "repeats"),
    ([planned(3), LOST, AGAIN, ACCEPTED, committed(3), planned(4)], "waits"),
    ([planned(3), LOST, AGAIN, ACCEPTED, planned(4), planned(5)], "recovered"),
    ([planned(3), LOST, AGAIN, ACCEPTED, committed(3), planned(4), {**AGAIN, "outer_iter": 4}], "recovered"),
], ids=["lost", "repeated", "accepted", "two workers", "between", "planned ahead", "trains"])
def test_why_names_the_wait(running: RunFolder, ledger: list[dict[str, Any]], wait: str) -> None:
    running.ledger.write_text("".join(json.dumps(line) + "\n" for line in ledger))
    answer = explain(running.path)
    assert (answer.state, answer.culprit) == ("RUNNING", "worker")
    assert wait in answer.first


def test_a_resumed_run_without_a_new_event_has_not_recovered(running: RunFolder) -> None:
    EventLog(running.events).opened("resume")
    answer = explain(running.path)
    assert answer.culprit == "coordinator"
    assert "recovered" not in answer.first
    assert "resumed" in answer.first
