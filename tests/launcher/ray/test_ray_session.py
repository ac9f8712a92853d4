"""The folder and the log of a run's own Ray: private, short enough for sockets, removed."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from ngsgd.launcher.ray import session
from ngsgd.launcher.ray.session import PrivateFolder, RayLog


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session, "scratch_folder", lambda: str(tmp_path))
    return tmp_path


def test_other_users_cannot_enter_the_folder_of_ray(base: Path) -> None:
    folder = PrivateFolder()
    # as Ray does
    Path(folder.temp_dir).mkdir()
    Path(folder.temp_dir).chmod(0o777)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.close()
    assert list(base.iterdir()) == []


def test_sockets_fit_wherever_temporary_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    socket = "session_2026-11-23_03-41-02_704349_4194303/sockets/plasma_store"
    for length in range(1, 120, 7):
        place = tmp_path / ("x" * length)
        place.mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(place))
        folder = PrivateFolder()
        assert len(f"{folder.temp_dir}/{socket}") <= 107
        folder.close()
    monkeypatch.setenv("RAY_TMPDIR", "/dev/shm")
    folder = PrivateFolder()
    assert folder.path.parent == Path("/dev/shm")
    folder.close()


def test_folders_of_runs_that_were_killed_are_removed_by_the_next_one(base: Path) -> None:
    killed, fresh, kept, living = (base / f"ngsgd-ray-{name}" for name in ("killed", "fresh", "kept", "living"))
    for folder in (killed, fresh, kept):
        (folder / "r").mkdir(parents=True)
    for folder in (killed, fresh):
        (folder / "lock").touch()
    os.utime(killed / "lock", (0, 0))
    first = PrivateFolder()
    os.utime(first.path / "lock", (0, 0))
    first.path.rename(living)
    second = PrivateFolder()
    assert not killed.exists()
    assert fresh.exists(), "its Ray may still be ending"
    assert kept.exists(), "a message refers to its logs"
    assert living.exists(), "its run holds the lock"
    second.close()


def test_logs_that_a_message_refers_to_stay(base: Path) -> None:
    folder = PrivateFolder()
    Path(folder.temp_dir).mkdir()
    folder.close(keep=True)
    assert Path(folder.temp_dir).is_dir()
    folder.close()
    assert Path(folder.temp_dir).is_dir()


def test_lines_are_kept_until_the_run_has_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, logger = RayLog(), logging.Logger("ray.test")
    logger.addHandler(log)
    logger.error("before")
    assert not list(tmp_path.iterdir())
    log.write_to(tmp_path / "ray.log")
    logger.error("after")
    lines = (tmp_path / "ray.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["before", "after"]
    assert capfd.readouterr() == ("", "")


def test_without_log_lines_there_is_no_file(tmp_path: Path) -> None:
    RayLog().write_to(tmp_path / "ray.log")
    assert not list(tmp_path.iterdir())
