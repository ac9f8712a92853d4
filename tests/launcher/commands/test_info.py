"""The state of a run, from its event log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ngsgd import process_identity
from ngsgd.errors import ClusterError
from ngsgd.launcher import cli
from ngsgd.launcher.commands import info
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.records import Incident
from ngsgd.training.storage.event_log import EventLog
from tests.launcher.records import Command, final_report, outer_iteration


@pytest.mark.parametrize(("status", "state"), [("FINISHED", "SUCCEEDED"), ("KILLED", "STOPPED"), ("FAILED", "FAILED")])
def test_a_run_that_ended(tmp_path: Path, status: str, state: str) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.outer_iteration(outer_iteration())
    log.incident(Incident("worker_died", "worker 1 died.", 11))
    log.finished(final_report())
    log.close(status)
    lines = info.describe_run(info.state_of(tmp_path))
    assert lines[1] == f"state      {state}"
    assert {"12/40,", "1.20/4,", "384000", "-1.920,", "61.2%"} <= set(lines[2].split())
    assert lines[3] == "result     %WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]"
    assert lines[-1] == "  ! worker 1 died."


def test_a_failed_run_shows_its_error_and_exit_code(tmp_path: Path) -> None:
    with pytest.raises(ClusterError), RunFolder(tmp_path).error_recorded():
        raise ClusterError("no worker is left")
    EventLog(tmp_path / "events.jsonl").close("FAILED")
    state = info.state_of(tmp_path)
    assert state["error"] == {"exit_code": 5, "message": "no worker is left"}
    assert any(line.endswith("5: no worker is left") for line in info.describe_run(state))
    with RunFolder(tmp_path).error_recorded():
        # resumed, and it ends well
        pass
    assert info.state_of(tmp_path)["error"] is None


def test_a_damaged_record_of_an_error_is_ignored(tmp_path: Path) -> None:
    for content in ("", "[]", '{"exit_code": true, "message": "x"}', '{"exit_code": 5}'):
        (tmp_path / "error.json").write_text(content)
        assert RunFolder(tmp_path).last_error() == {}


def test_a_run_is_pending_then_running_and_lost_after_a_kill(tmp_path: Path) -> None:
    assert info.describe_run(info.state_of(tmp_path))[1] == "state      PENDING (no event yet)"
    EventLog(tmp_path / "events.jsonl").outer_iteration(outer_iteration())
    with RunFolder(tmp_path).marked_as_running():
        state = info.state_of(tmp_path)
        assert (state["state"], state["process"]["process_id"]) == ("RUNNING", os.getpid())
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "outer_it')  # cut short by a kill
    assert info.describe_run(info.state_of(tmp_path))[1].startswith("state      LOST: ")


def test_versions_name_the_package_and_can_be_json(command: Command) -> None:
    assert command("info").out.startswith("ngsgd ")
    assert json.loads(command("info", "--json").out)["torch"]


# ngsgd stop ---------------------------------------------------------------------------------------


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any run, in a separate group."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def make_run(folder: Path, process: object) -> Path:
    folder.mkdir()
    (folder / "config.yaml").touch()
    EventLog(folder / "events.jsonl").outer_iteration(outer_iteration())
    (folder / "process.json").write_text(json.dumps(process))
    return folder


@pytest.mark.parametrize("record", [
    lambda pid: {"host": socket.gethostname(), "process_id": pid},
    lambda pid: {"host": socket.gethostname(), "process_id": -pid},
    lambda pid: {**process_identity.current(), "process_id": pid},
    lambda pid: {**process_identity.current(), "process_id": -pid},
    lambda pid: {**process_identity.current(), "process_id": pid, "start_time": None},
    lambda pid: {**process_identity.current(), "process_id": pid, "boot_id": "another"},
    lambda pid: {"host": socket.gethostname(), "process_id": [pid]},
    lambda pid: {"host": [], "process_id": pid},
])
def test_stop_signals_no_process_that_is_not_proved_to_be_the_runs(
        tmp_path: Path, stranger: subprocess.Popen[bytes], record: Callable[[int], object],
        capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", record(stranger.pid))
    cli.main(["stop", str(run), "--timeout", "1"])
    assert stranger.poll() is None
    assert "SUCCEEDED" not in capsys.readouterr().out


@pytest.mark.parametrize("process_id", [-1, 0, 1, True, 2**40])
def test_stop_never_signals_everybody(tmp_path: Path, process_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    for number, more in enumerate(({}, process_identity.current())):
        run = make_run(tmp_path / f"run{number}", {"host": socket.gethostname(), **more, "process_id": process_id})
        cli.main(["stop", str(run), "--timeout", "1"])
    assert sent == []


def test_a_process_id_alone_is_unknown_and_stop_explains_how_to_check(
        tmp_path: Path, stranger: subprocess.Popen[bytes], command: Command) -> None:
    run = make_run(tmp_path / "run", {"host": socket.gethostname(), "process_id": stranger.pid})
    assert info.state_of(run)["state"] == "UNKNOWN"
    assert cli.main(["status", str(run)]) == 0
    assert f"ps -fp {stranger.pid}" in command("stop", str(run), code=2).err


def test_an_id_that_was_reused_is_a_lost_run(tmp_path: Path, stranger: subprocess.Popen[bytes]) -> None:
    run = make_run(tmp_path / "run", {**process_identity.current(), "process_id": stranger.pid})
    assert info.state_of(run)["state"] == "LOST"


def test_stop_ends_the_process_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = ("import pathlib, sys, time; from ngsgd.runs.run_folder import RunFolder\n"
              "run = RunFolder(pathlib.Path(sys.argv[1]))\n"
              "with run.locked('train', print), run.marked_as_running(): print('up', flush=True); time.sleep(600)")
    run = make_run(tmp_path / "run", {})
    command = [sys.executable, "-c", script, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, contextlib.ExitStack() as end:
        # it would live for ten minutes after a failed assertion
        end.callback(process.kill)
        assert process.stdout
        process.stdout.readline()
        assert info.state_of(run)["state"] == "RUNNING"
        # its parent, this process, asks for its exit status only later; a zombie has ended
        assert cli.main(["stop", str(run), "--timeout", "60"]) == 0
    assert process.returncode == -signal.SIGTERM
    assert "LOST" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "call", "is_speech"), [
    ("''", "ngsgd resume", True), ("module:make_task", "ngsgd resume", False),
    ("python:make_task", "ngsgd.train(make_task, resume=", False)])
def test_the_state_names_the_call_that_continues_the_run(target: str, call: str, is_speech: bool, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"seed: 0\ntask:\n  _target_: {target}\n  args: null\n")
    state = info.state_of(tmp_path)
    assert call in state["resume"] and str(tmp_path) in state["resume"]
    assert state["is_speech"] is is_speech
