"""One coordinator per run folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ngsgd.errors import CheckpointError, RunLockedError
from ngsgd.training.storage.lock import RunLock, holder_of, read_lock


def _hold(path: Path, ready: Connection) -> None:
    with RunLock(path, "train"):
        ready.send(os.getpid())
        signal.pause()


class Holder:
    """Another process that holds the lock until it is killed."""

    def __init__(self, path: Path) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=_hold, args=(path, theirs))
        self.process.start()
        assert ours.recv() == self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    holder = Holder(tmp_path / "lock")
    try:
        with pytest.raises(RunLockedError, match=str(holder.process.pid)):
            RunLock(tmp_path / "lock", "resume").acquire()
        held = holder_of(tmp_path / "lock")
        assert held is not None and held["holder"]["process_id"] == holder.process.pid and held["purpose"] == "train"
    finally:
        holder.kill()


def test_a_killed_holder_leaves_the_lock_free_and_the_next_fence_is_larger(tmp_path: Path) -> None:
    holder = Holder(tmp_path / "lock")
    holder.kill()
    assert holder_of(tmp_path / "lock") is None
    with RunLock(tmp_path / "lock", "resume") as lock:
        assert lock.fence == 2
    with RunLock(tmp_path / "lock", "resume") as lock:
        assert lock.fence == 3
    assert holder_of(tmp_path / "lock") is None and read_lock(tmp_path / "lock") == {"fence": 3}


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"fence": "x"}', '{"fence": -5, "holder": 3}', "[" * 3000])
def test_a_damaged_lock_file_is_replaced_and_the_fence_continues(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with RunLock(tmp_path / "lock", "resume", last_fence=7) as lock:
        assert lock.fence == 8
        lock.require_held()


@pytest.mark.parametrize("kind", ["directory", "symlink", "pipe"])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "directory":
        path.mkdir()
    elif kind == "symlink":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match="lock"):
        RunLock(path, "resume").acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_a_holder_that_was_superseded_may_not_commit(tmp_path: Path) -> None:
    with RunLock(tmp_path / "lock", "train") as lock:
        lock.require_held()
        # as on a file system without locks, where a second process could begin
        (tmp_path / "lock").write_text(json.dumps({"fence": 2}))
        with pytest.raises(RunLockedError, match="taken over"):
            lock.require_held()
        (tmp_path / "lock").unlink()
        with pytest.raises(RunLockedError, match="removed"):
            lock.require_held()
