"""The audit finds what a coordinator must never do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ngsgd.files import FORMATS
from ngsgd.training.storage.audit import audit

Line = dict[str, Any]


def piece(archive: int, outer_iter: int = 0) -> list[int | None]:
    return [archive, 0, outer_iter, archive, 0, None]


def planned(job: int, outer_iter: int = 0, pieces: list[Any] | None = None) -> Line:
    return {"event": "planned", "outer_iter": outer_iter, "job": job, "pieces": pieces or [piece(job, outer_iter)], "lr": 0.1}


def submitted(job: int, outer_iter: int = 0, attempt: int = 1) -> Line:
    return {"event": "submitted", "outer_iter": outer_iter, "job": job, "attempt": attempt}


def settled(job: int, event: str = "accepted", outer_iter: int = 0, num_frames: int = 10, **fields: Any) -> Line:
    return {"event": event, "outer_iter": outer_iter, "job": job, "attempt": 1, "num_frames": num_frames, "left": [],
            "pieces": [piece(job, outer_iter)], **fields}


def committed(outer_iter: int = 0, frames: int = 20, model: str = "a", parent: str = "", num_accepted: int = 2,
              **fields: Any) -> Line:
    return {"event": "committed", "outer_iter": outer_iter, "frames_processed": frames, "model": model, "parent": parent,
            "num_accepted": num_accepted, "numbers": {"lr": 0.1}, **fields}


STARTED = {"event": "started", "format": FORMATS["ledger"], "after": -1, "min_accepted_fraction": 0.5}
PLAN = [planned(0), planned(1), submitted(0), submitted(1)]
FIRST = [*PLAN, settled(1), settled(0), committed()]
SECOND = [planned(0, 1), planned(1, 1), submitted(0, 1), submitted(1, 1), settled(0, outer_iter=1), settled(1, outer_iter=1),
          committed(1, 40, "b", "a")]
GOOD = [STARTED, *FIRST, *SECOND]


def problems(tmp_path: Path, lines: list[Line]) -> list[str]:
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return audit(path)


BACK = {**STARTED, "after": 0}
GOOD_LEDGERS = {
    "good": GOOD,
    "the last plan of an interrupted iteration counts": [STARTED, *PLAN, settled(1), STARTED, *FIRST],
    "a run goes back behind a commit whose checkpoint was lost": [*GOOD, BACK, *SECOND],
    "a commit without a line is repeated": [STARTED, *FIRST[:-1], BACK, FIRST[-1], *SECOND],
    "a commit is repeated after a crash": [STARTED, *FIRST, BACK, FIRST[-1], *SECOND],
    "a rolled-back outer iteration does not count": [
        STARTED, *PLAN, *(settled(job, "rejected", reason="nan") for job in (0, 1)),
        {"event": "rolled_back", "outer_iter": 0}, *FIRST],
}


@pytest.mark.parametrize("name", GOOD_LEDGERS)
def test_a_good_ledger_has_no_problem(name: str, tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD_LEDGERS[name]) == []


def test_a_deferred_shard_may_return_once(tmp_path: Path) -> None:
    put_off = [*PLAN, settled(0), settled(1, "deferred"), committed(frames=10, num_accepted=1)]
    back = [planned(0, 1), planned(1, 1, [piece(1, 0)]), submitted(0, 1), submitted(1, 1), settled(0, outer_iter=1),
            settled(1, outer_iter=1, pieces=[piece(1, 0)]), committed(1, 30, "b", "a")]
    assert problems(tmp_path, [STARTED, *put_off, *back]) == []
    again = [{**line, "outer_iter": 2} for line in back[1:2] + back[3:4] + back[5:6]]
    again[0]["job"] = again[1]["job"] = again[2]["job"] = 0
    found = problems(tmp_path, [STARTED, *put_off, *back, *again, committed(2, 40, "c", "b", num_accepted=1)])
    assert any("never deferred" in problem for problem in found)
    assert any("was counted 2 times" in problem for problem in found)


def test_a_line_cut_short_by_a_crash_is_ignored(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD) == []
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "plan')
    assert audit(tmp_path / "ledger.jsonl") == []


@pytest.mark.parametrize(("lines", "problem"), [
    ([*PLAN, settled(1), committed(frames=10, num_accepted=1)], "settled 0 times"),
    ([*PLAN, settled(1), settled(0), settled(0), committed(frames=30, num_accepted=3)], "settled 2 times"),
    ([*PLAN, settled(1), settled(0), committed(frames=99)], "20 frames accepted, 99"),
    ([*PLAN, settled(1), settled(0), settled(7), committed(frames=30, num_accepted=3)], "job 7 "),
    ([*PLAN, settled(1), settled(0, pieces=[piece(9)]), committed()], "another work"),
    ([*PLAN, settled(1), settled(0, attempt=2), committed()], "attempt 2, was"),
    ([*PLAN, settled(1, "rejected"), settled(0, "rejected"), committed(frames=0, num_accepted=0)], "0 results of 2"),
    ([*FIRST, *[{**line, "outer_iter": 4} for line in SECOND]], "are [0, 4]"),
    ([*FIRST, *SECOND[:-1], committed(1, 40, "b", "elsewhere")], "'elsewhere'"),
    ([*PLAN, settled(1), settled(0), committed(numbers={"lr": float("nan")})], "finite"),
    ([*PLAN, settled(1), settled(0), committed(numbers={"lr": 0.2})], "[0.1] were planned, 0.2"),
    ([*PLAN, submitted(0, attempt=2), settled(1), settled(0), committed()], "attempt 1, was"),
])
def test_each_fault_is_found(tmp_path: Path, lines: list[Line], problem: str) -> None:
    assert any(problem in found for found in problems(tmp_path, [STARTED, *lines]))


def test_halves_of_a_piece_may_be_counted_apart_but_not_overlapping(tmp_path: Path) -> None:
    pieces: list[list[int | None]] = [[1, 0, 0, 1, 0, None], [1, 0, 0, 1, 4, 9], [1, 0, 0, 1, 3, 9]]
    half, rest, more = pieces
    partly = [*PLAN, settled(0), settled(1, pieces=[half], left=[rest]), committed()]

    def then(piece: list[int | None]) -> list[Line]:
        return [planned(0, 1, [piece]), submitted(0, 1), settled(0, outer_iter=1, pieces=[piece]),
                committed(1, 30, "b", "a", num_accepted=1)]
    assert problems(tmp_path, [STARTED, *partly, *then(rest)]) == []
    assert problems(tmp_path, [STARTED, *partly, *then([*rest[:5], 6])]) == []
    found = problems(tmp_path, [STARTED, *partly, *then(more)])
    assert any("never deferred" in problem for problem in found)
    assert any("was counted 2 times" in problem for problem in found)


ODD = ("5", "null", "{}", "[]", '"x"', "\xff\xfe", '{"event": 3}', '{"event": "unheard of"}', "[" * 50_000, '{"event": "planned"}',
       '{"event": "committed", "outer_iter": "x"}', '{"event": "accepted", "outer_iter": 0, "job": 0, "attempt": 1, "pieces": 3}')


@pytest.mark.parametrize("odd", ODD)
def test_a_line_of_any_other_kind_is_a_finding(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "ledger.jsonl"
    written = "".join(json.dumps(entry) + "\n" for entry in GOOD)
    path.write_text(written + odd + "\n", encoding="latin-1")
    assert len(audit(path)) == 1 and f"line {len(GOOD) + 1}" in audit(path)[0]


@pytest.mark.parametrize("value", ["x", None, -1, 10**30, [], [[1]], {}, {"lr": "x"}, True, 1.5])
def test_no_value_of_any_field_makes_the_audit_fail(tmp_path: Path, value: Any) -> None:
    for number, line in enumerate(GOOD):
        for name in line:
            changed = [*GOOD[:number], {**line, name: value}, *GOOD[number + 1:]]
            problems(tmp_path, changed)


def test_a_missing_ledger_is_a_finding(tmp_path: Path) -> None:
    assert len(audit(tmp_path / "ledger.jsonl")) == 1
    assert len(audit(tmp_path)) == 1


def test_commits_of_two_processes_are_a_finding(tmp_path: Path) -> None:
    first, second = {**STARTED, "fence": 1}, {**STARTED, "after": 0, "fence": 2}
    one, two = {**committed(), "fence": 1}, {**SECOND[-1], "fence": 2}
    in_order = [first, *FIRST[:-1], one, second, one, *SECOND[:-1], two]
    assert problems(tmp_path, in_order) == []
    assert problems(tmp_path, [*in_order[:-1], {**two, "fence": 1}]) != []
    assert problems(tmp_path, [first, *FIRST[:-1], one, {**second, "fence": 1}, *SECOND[:-1], {**two, "fence": 1}]) != []
