"""The audit finds what a coordinator must never do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ngsgd.training.ledger import audit


def line(event: str, job: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": event, "outer_iter": 0, "job": job, "archive": job, "frame": 0, **fields}


PLAN = [line("planned", 0), line("planned", 1)]
GOOD = [*PLAN, line("accepted", 1, num_frames=10), line("accepted", 0, num_frames=5), line("committed", frames_processed=15)]


def problems(tmp_path: Path, lines: list[dict[str, Any]]) -> list[str]:
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return audit(path)


def test_a_good_ledger_has_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD) == []


def test_an_interrupted_outer_iteration_counts_only_its_last_plan(tmp_path: Path) -> None:
    assert problems(tmp_path, [*PLAN, line("accepted", 1, num_frames=10), *GOOD]) == []


def test_a_line_cut_short_by_a_crash_is_ignored(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD) == []
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "plan')
    assert audit(tmp_path / "ledger.jsonl") == []


@pytest.mark.parametrize(("lines", "problem"), [
    ([*GOOD[:3], line("committed", frames_processed=10)], "job 0 was settled 0 times"),
    ([*GOOD[:4], line("accepted", 0, num_frames=5), line("committed", frames_processed=20)], "job 0 was settled 2 times"),
    ([*GOOD[:4], line("committed", frames_processed=99)], "15 frames accepted, 99 committed"),
    ([*GOOD[:4], line("accepted", 7, num_frames=1), line("committed", frames_processed=16)], "job 7 was not planned"),
    ([*GOOD[:3], line("accepted", 0, num_frames=5, archive=9), GOOD[-1]], "counted another shard"),
    ([*GOOD, *PLAN, line("committed", outer_iter=4, frames_processed=15)], "committed outer iterations are [0, 4]"),
])
def test_each_fault_is_found(tmp_path: Path, lines: list[dict[str, Any]], problem: str) -> None:
    assert any(problem in found for found in problems(tmp_path, lines))
