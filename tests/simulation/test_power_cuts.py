"""Files of a run survive a power cut after any earlier death: bugs that were found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ngsgd.config import RunConfig
from ngsgd.errors import CheckpointError, RunLockedError
from ngsgd.files import JsonLines, read_json_lines
from ngsgd.runs.run_folder import RunFolder, check_output_dir
from ngsgd.training.storage.event_log import EventLog
from ngsgd.training.storage.lock import RunLock
from tests.launcher.records import outer_iteration
from tests.simulation.disk import SimulatedDisk
from tests.simulation.world import Fault, Killed, World


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SimulatedDisk]:
    one = SimulatedDisk(tmp_path / "disk")
    with one.installed():
        yield one


def _begin(disk: SimulatedDisk, *faults: Fault) -> Path:
    disk.begin(World(faults), records=True, has_locks=True)
    return Path(disk.root)


def _die(disk: SimulatedDisk, action: Callable[[], object]) -> bool:
    """Run an action that a fault may end; return whether it did."""
    try:
        action()
    except Killed:
        disk.end_process({})
        disk.world = World()
        return True
    return False


def _new_run(root: Path) -> None:
    config = RunConfig(output_dir=str(root / "runs"), name="one")
    check_output_dir(config)
    RunFolder.create(config, "name: one\n")


@pytest.mark.parametrize("operation", range(15))
def test_a_run_that_can_be_resumed_survives_a_power_cut(disk: SimulatedDisk, operation: int) -> None:
    root = _begin(disk, Fault("operation", operation, "kill"))
    _die(disk, lambda: _new_run(root))
    found = list(root.glob("runs/*/config.yaml"))
    for config in found:
        # what a resumed process does first
        with RunLock(config.parent / "lock", "resume"):
            pass
    disk.cut_power("strict")
    assert [config.exists() for config in found] == [True] * len(found)


def _log(path: Path, *numbers: int) -> None:
    lines = JsonLines(path)
    for number in numbers:
        lines.append({"number": number})
    lines.sync()
    lines.close()


@pytest.mark.parametrize("operation", range(4))
def test_lines_of_a_killed_process_are_synced_by_the_next(disk: SimulatedDisk, operation: int) -> None:
    root = _begin(disk, Fault("operation", operation, "kill"))
    path = root / "log.jsonl"
    _die(disk, lambda: _log(path, 1))
    written = read_json_lines(path) if path.exists() else []
    _log(path)
    disk.cut_power("strict")
    assert read_json_lines(path) == written


def test_a_log_that_could_not_be_synced_is_closed(disk: SimulatedDisk) -> None:
    root = _begin(disk, Fault("sync", 0, "EIO"))
    with pytest.raises(OSError, match="Input/output"):
        JsonLines(root / "log.jsonl")
    assert not disk.open_files


def test_an_event_log_that_cannot_be_read_is_closed(disk: SimulatedDisk) -> None:
    root = _begin(disk, Fault("read", 0, "EIO"))
    (root / "events.jsonl").write_text("{}\n")
    with pytest.raises(OSError, match="Input/output"):
        EventLog(root / "events.jsonl")
    assert not disk.open_files


def test_a_lock_that_could_not_be_synced_can_be_taken_again(disk: SimulatedDisk) -> None:
    root = _begin(disk, Fault("sync", 1, "EIO"))
    with pytest.raises(CheckpointError):
        RunLock(root / "lock", "train").acquire()
    assert not disk.open_files
    with RunLock(root / "lock", "train") as lock:
        lock.require_held()


def test_a_replaced_process_writes_no_outer_iteration(disk: SimulatedDisk) -> None:
    root = _begin(disk)
    # as on a file system of several machines without locks
    disk.has_locks = False
    with RunLock(root / "lock", "train") as lock:
        events = EventLog(root / "events.jsonl", lock=lock)
        disk.new_process("another-host")
        with RunLock(root / "lock", "resume"):
            with pytest.raises(RunLockedError):
                events.outer_iteration(outer_iteration(0))
            assert not os.path.getsize(root / "events.jsonl")
        events.close("FAILED")
