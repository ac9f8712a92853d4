"""Commands and resumptions of runs with long logs read their ends."""

from __future__ import annotations

import functools
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd import files
from ngsgd.config import RunConfig
from ngsgd.launcher import cli, run_state
from ngsgd.launcher.commands import report
from ngsgd.launcher.run_state import state_of
from ngsgd.launcher.why import facts
from ngsgd.runs import config_file
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.storage.event_log import EventLog, read_events
from tests.launcher.records import job, outer_iteration

NUM_JOBS = 64
# of the ends that are read in these tests, instead of megabytes
END_BYTES = 1 << 18


def write_logs(folder: RunFolder, num_outer_iters: int, num_jobs: int = NUM_JOBS) -> None:
    """The logs of a run, one incident in each outer iteration; the last process was killed."""
    jobs = tuple(job(number=number, worker=number) for number in range(num_jobs))
    template = json.dumps({"event": "outer_iteration", **asdict(outer_iteration(0, num_outer_iters=num_outer_iters, jobs=jobs))})
    with folder.events.open("w") as events, folder.ledger.open("w") as ledger:
        events.write('{"event": "opened", "purpose": "train"}\n')
        ledger.write('{"event": "started", "format": 1, "after": -1, "min_accepted_fraction": 0.5, "fence": 3}\n')
        for number in range(num_outer_iters):
            incident = {"event": "incident", "what": "worker_died", "message": f"incident {number}", "outer_iter": number}
            events.write(json.dumps(incident) + "\n")
            events.write(template.replace('"outer_iter": 0', f'"outer_iter": {number}') + "\n")
            for one in range(num_jobs):
                about = f'"outer_iter": {number}, "job": {one}, "attempt": 1'
                ledger.write(f'{{"event": "planned", {about}, "pieces": [], "lr": 0.1}}\n{{"event": "accepted", {about}}}\n')
            ledger.write(f'{{"event": "committed", "outer_iter": {number}, "fence": 7}}\n')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = RunConfig(output_dir=str(tmp_path / "runs"), name="long")
    return RunFolder.create(config, config_file.to_yaml(config))


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The bytes that were read from logs."""
    opened: list[Any] = []
    plain = files.open_regular

    class Counted:
        def __init__(self, path: Path) -> None:
            self.file, self.num_bytes = plain(path), 0
            opened.append(self)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def read(self, *arguments: int, method: str = "read") -> bytes:
            found: bytes = getattr(self.file, method)(*arguments)
            self.num_bytes += len(found)
            return found

        readline = functools.partialmethod(read, method="readline")

    def counted(path: Path) -> Any:
        return Counted(path) if path.suffix == ".jsonl" else plain(path)
    monkeypatch.setattr(files, "open_regular", counted)
    monkeypatch.setattr(run_state, "_END_BYTES", END_BYTES, raising=False)
    monkeypatch.setattr(facts, "_MAX_BYTES", END_BYTES, raising=False)
    return lambda: sum(one.num_bytes for one in opened)


def event_log(folder: RunFolder) -> None:
    EventLog(folder.events, after=119).close("KILLED")


def locked(folder: RunFolder) -> None:
    with folder.locked("resume", print) as lock:
        assert lock.fence == 8


def command(*words: str) -> Callable[[RunFolder], None]:
    def run(folder: RunFolder) -> None:
        assert cli.main([*words, str(folder.path)]) == 0
    return run


@pytest.mark.entry("At3", "look at or resume a run whose logs have gigabytes (50,000 outer iterations of 64 jobs)", "works",
                   "`status`, `info`, `why` and `resume` read the ends of the logs; `report` reads line by line, and notes "
                   "which jobs it contains.")
@pytest.mark.parametrize("use", [command("status"), command("info"), command("why"), event_log, locked])
def test_the_end_of_a_long_log_is_read(folder: RunFolder, num_read: Callable[[], int], use: Callable[[RunFolder], None]) -> None:
    write_logs(folder, 120)
    size = folder.events.stat().st_size + folder.ledger.stat().st_size
    use(folder)
    assert 0 < num_read() < 6 * END_BYTES < size / 2


def test_status_of_a_long_log_is_that_of_its_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_logs(folder, 30, num_jobs=8)
    short = state_of(folder.path)
    assert short["num_incidents"] == 30 and not short["incidents_since_outer_iter"]
    monkeypatch.setattr(run_state, "_END_BYTES", END_BYTES // 8)
    long = state_of(folder.path)
    since = long["incidents_since_outer_iter"]
    assert 0 < since < 30 and long["num_incidents"] == 30 - since - 1
    assert {**long, "num_incidents": 30, "incidents_since_outer_iter": 0, "silent_s": 0} == {**short, "silent_s": 0}
    assert long["incidents"] == [f"incident {number}" for number in range(25, 30)]


def test_a_long_log_is_explained_by_its_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_logs(folder, 30, num_jobs=8)
    complete = facts.lines_of(folder.events)
    assert [line.source for line in complete[:2]] == ["events.jsonl:1", "events.jsonl:2"]
    monkeypatch.setattr(facts, "_MAX_BYTES", END_BYTES // 8)
    end = facts.lines_of(folder.events)
    assert 0 < len(end) < len(complete) and end[-1].source == "events.jsonl:-1"
    assert [line.fields for line in end] == [line.fields for line in complete[-len(end):]]
    folder.events.write_text("")
    assert facts.lines_of(folder.events) == []


def test_lines_of_a_lost_commit_are_renamed_in_a_long_log(folder: RunFolder) -> None:
    write_logs(folder, 20, num_jobs=1)
    folder.events.write_bytes(folder.events.read_bytes() + b'\xff not UTF-8\n{"event": "clo')
    before = folder.events.read_bytes()
    log = EventLog(folder.events, after=17)
    assert log.has(17) and not log.has(18)
    log.close("KILLED")
    lines, old = folder.events.read_bytes().split(b"\n"), before.split(b"\n")
    changed = [number for number, (one, other) in enumerate(zip(lines, old, strict=False)) if one != other]
    assert [json.loads(lines[number])["event"] for number in changed] == ["superseded_outer_iteration"] * 2 + ["closed"]
    assert {event["outer_iter"] for event in read_events(folder.events) if event["event"] == "outer_iteration"} == set(range(18))


@pytest.mark.slow
@pytest.mark.entry("At3")
def test_a_report_of_a_long_log_has_all_scores_and_names_the_jobs_in_it(
        folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_logs(folder, 30, num_jobs=4)
    monkeypatch.setattr(report, "_JOBS_BYTES", folder.events.stat().st_size // 3)
    run = report.history_of(folder)
    assert len(run.curve.positions) == 30
    with_jobs = [event["outer_iter"] for event in run.iterations if event["jobs"]]
    assert 5 < len(with_jobs) < 15 and with_jobs[-1] == 29
    page = tmp_path / "page.html"
    report.write(folder, page)
    assert f"after outer iteration {with_jobs[0]}" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("use", [command("status"), command("info"), command("why"), event_log, locked])
def test_memory_does_not_grow_with_the_log(folder: RunFolder, use: Callable[[RunFolder], None]) -> None:
    peaks = []
    for number in (400, 1200):
        write_logs(folder, number)
        folder.lock.unlink(missing_ok=True)
        tracemalloc.start()
        use(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # `why` parses the last 16 MB of each log
    assert max(peaks) < 120e6


def test_a_line_without_an_end_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "opened"}\n' + bytes(8 << 20) + b'\n{"event": "closed", "status": "FAILED"}\n')
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    tracemalloc.start()
    try:
        forward, backward = files.read_json_lines(path), list(files.lines_from_end(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [line["event"] for line in forward] == ["opened", "closed"] and len(backward) == 4
    assert peak < 6 << 20


def test_new_lines_of_a_followed_log_are_read_once(folder: RunFolder) -> None:
    from ngsgd.launcher.commands.cluster import jobs

    record = replace(outer_iteration(0), jobs=())
    log = EventLog(folder.events)
    log.opened("train")
    found = list(jobs.events_after(folder.events, 0))
    assert [event["event"] for event, _ in found] == ["opened"]
    log.outer_iteration(record)
    with folder.events.open("a") as file:
        file.write('{"event": "inci')
    more = list(jobs.events_after(folder.events, found[-1][1]))
    assert [event["event"] for event, _ in more] == ["outer_iteration"]
    assert list(jobs.events_after(folder.events, more[-1][1])) == []
