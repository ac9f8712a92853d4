"""A process is recognized by more than its id, and only a recognized one is signaled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ngsgd import process_identity
from tests.tiers import HANGS_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="identities come from /proc")


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                               stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    start_time = process_identity.state_and_start_time(process.pid)[1]
    yield process, {**process_identity.current(), "process_id": process.pid, "start_time": start_time}
    process.kill()
    process.wait()


def test_the_current_process_is_alive_and_can_be_signalled() -> None:
    received = []
    old = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        assert process_identity.is_alive(process_identity.current())
        assert process_identity.send_signal(process_identity.current(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert received == [signal.SIGUSR1]


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_process_that_is_recognized_is_signalled(sleeper: tuple[subprocess.Popen[bytes],
                                                                  dict[str, Any]], has_pidfd: bool,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    process, identity = sleeper
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    assert not process_identity.send_signal({**identity, "start_time": 1}, signal.SIGTERM)
    assert process_identity.send_signal(identity, signal.SIGTERM)
    assert process.wait(HANGS_S) == -signal.SIGTERM
    assert not process_identity.is_alive(identity)
    assert not process_identity.send_signal(identity, signal.SIGTERM)


@pytest.mark.parametrize("change", [
    {"start_time": 1}, {"start_time": None}, {"start_time": "1"}, {"boot_id": "00000000-0000-0000-0000-000000000000"},
    {"boot_id": None}, {"host": "elsewhere"}, {"user": 12345678}, {"pid_namespace": "pid:[1]"}, {"process_id": -1},
    {"process_id": 0}, {"process_id": 1}, {"process_id": True}, {"process_id": 2.0}, {"process_id": "2"},
    {"process_id": 10**30}, {"process_id": None}, {"process_id": [2]}])
def test_nothing_is_signalled_when_one_part_of_the_identity_differs(
        sleeper: tuple[subprocess.Popen[bytes], dict[str, Any]], change: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch) -> None:
    process, identity = sleeper
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *what: sent.append(what))
    assert not process_identity.is_alive({**identity, **change})
    assert not process_identity.send_signal({**identity, **change}, signal.SIGTERM)
    # its group
    assert not process_identity.send_signal({**identity, "process_id": -process.pid}, signal.SIGTERM)
    assert not sent
    assert process.poll() is None


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start_time = process_identity.state_and_start_time(process.pid)[1]
    identity = {**process_identity.current(), "process_id": process.pid, "start_time": start_time}
    assert process_identity.is_alive(identity)
    process.kill()
    # it has ended, and nobody has asked for its exit status
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not process_identity.is_alive(identity)
    process.wait()


def test_without_proc_no_process_is_recognized(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    whole = process_identity.current()
    monkeypatch.setattr(process_identity, "PROC", tmp_path)
    assert process_identity.current()["start_time"] is None
    assert not process_identity.is_complete(process_identity.current())
    assert not process_identity.is_alive(process_identity.current())
    assert not process_identity.send_signal(whole, signal.SIGTERM)


@pytest.mark.parametrize("stored", [{}, {"host": "a", "process_id": 5}, {"process_id": {}}])
def test_an_incomplete_identity_is_not_alive(stored: dict[str, Any]) -> None:
    assert not process_identity.is_complete(stored)
    assert not process_identity.is_alive(stored)
    assert not process_identity.send_signal(stored, signal.SIGTERM)
