"""The judge finds every kind of corruption of a ledger, and nothing in the ledger as written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.simulation import checks
from tests.simulation.disk import SimulatedDisk
from tests.simulation.scenario import Scenario
from tests.simulation.trial import Trial

Line = dict[str, Any]
Corrupt = Callable[[list[Line]], object]


def _of(lines: list[Line], event: str, number: int = 0) -> Line:
    return [line for line in lines if line["event"] == event][number]


def _change(event: str, number: int = 0, /, **changes: Callable[[Any], Any]) -> Corrupt:
    def corrupt(lines: list[Line]) -> None:
        line = _of(lines, event, number)
        line |= {name: change(line[name]) for name, change in changes.items()}
    return corrupt


def _remove(event: str, number: int = 0) -> Corrupt:
    return lambda lines: lines.remove(_of(lines, event, number))


def _repeat(event: str, /, **changes: Any) -> Corrupt:
    return lambda lines: lines.insert(lines.index(line := _of(lines, event)) + 1, {**line, **changes})


def _exchange(event: str, name: str) -> Corrupt:
    """Exchange a field of the first two lines of a kind."""
    def corrupt(lines: list[Line]) -> None:
        one, other = _of(lines, event, 0), _of(lines, event, 1)
        one[name], other[name] = other[name], one[name]
    return corrupt


def _other_digest(text: str) -> str:
    return text[:-1] + ("0" if text[-1] != "0" else "1")


def _other_shard(pieces: list[list[Any]]) -> list[list[Any]]:
    return [[(pieces[0][0] + 1) % 3, *pieces[0][1:]], *pieces[1:]]


CORRUPTIONS: dict[str, Corrupt] = {
    "a result has another weight": _change("accepted", num_frames=lambda number: number + 4),
    "a result has another vector": _change("accepted", digest=_other_digest),
    "a result is missing": _remove("accepted"),
    "a result counts twice": _repeat("accepted"),
    "an accepted result is called rejected": _change("accepted", event=lambda _: "rejected", reason=lambda _: "worse"),
    "a result is of another job": _exchange("accepted", "job"),
    "two results are exchanged": _exchange("accepted", "digest"),
    "a result is of another shard": _change("accepted", pieces=_other_shard),
    "a result left work": _change("accepted", left=lambda _: [[0, 0, 0, 0, 1, None]]),
    "a result is of an attempt that never began": _change("accepted", attempt=lambda number: number + 1),
    "a result is of another outer iteration": _change("accepted", outer_iter=lambda number: number + 1),
    "an attempt has no line": _remove("submitted"),
    "a job has another learning rate": _change("planned", lr=lambda lr: 1.01 * lr),
    "a plan has another shard": _change("planned", pieces=_other_shard),
    "a plan is missing": _remove("planned", 1),
    "a commit has another model": _change("committed", model=_other_digest),
    "a commit has another parent": _change("committed", 1, parent=_other_digest),
    "a commit has other frames": _change("committed", frames_processed=lambda number: number + 4),
    "a commit counts other results": _change("committed", num_accepted=lambda number: number + 1),
    "a commit has another learning rate": _change("committed", numbers=lambda numbers: {**numbers, "lr": 1.01 * numbers["lr"]}),
    "a commit is missing": _remove("committed", 1),
    "two commits are exchanged": _exchange("committed", "outer_iter"),
    "a roll-back is made up": _repeat("submitted", event="rolled_back", reason="worse", lr_scale=0.25),
    "a process began after a commit that is not there": _change("started", after=lambda _: 0)}


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A run of two jobs with momentum, without faults."""
    disk = SimulatedDisk(tmp_path_factory.mktemp("judge") / "disk")
    scenario = next(one for one in (Scenario.of(random.Random(seed)) for seed in range(1000))
                    if one.settings["outer"] == {"kind": "bmuf", "gain": 1.5} and one.policy == "retry" and one.has_locks
                    and one.num_archives == 3 and one.settings["schedule"]["num_jobs_initial"] == 2 and not one.depends_on_time)
    with disk.installed():
        found = Trial(disk, scenario, ())
        found.run()
        yield found


def test_the_ledger_of_a_run_has_no_problem(trial: Trial) -> None:
    assert checks.problems(trial) == []


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupted_ledger_has_a_problem(trial: Trial, kind: str) -> None:
    path = trial.folder / "ledger.jsonl"
    written = path.read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    CORRUPTIONS[kind](lines)
    try:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert path.read_text() != written
        assert checks.problems(trial)
    finally:
        path.write_text(written)
