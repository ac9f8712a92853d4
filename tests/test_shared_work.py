import subprocess
import sys
from pathlib import Path

import pytest

from ngsgd import shared_work


def test_a_lock_has_one_holder_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    with shared_work.lock(path) as is_mine, shared_work.lock(path) as is_mine_too:
        assert (is_mine, is_mine_too) == (True, False)
    code = ("import os, sys\nfrom pathlib import Path\nfrom ngsgd import shared_work\n"
            "with shared_work.lock(Path(sys.argv[1])):\n  os._exit(9)")
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    with shared_work.lock(path) as is_mine:
        assert is_mine


def test_a_work_directory_is_removed_after_success_by_its_last_user(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "work"
    with shared_work.work_directory(path):
        (path / "result").write_text("kept")
        with shared_work.work_directory(path):
            pass
        assert (path / "result").exists()
    assert not path.exists()


def test_files_of_a_work_directory_are_kept_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "work"
    path.mkdir(parents=True)
    (path / "result").write_text("kept")
    (path / "one.lock").touch()
    (path / "own").mkdir()
    with pytest.raises(ValueError, match="stop"), shared_work.work_directory(path):
        raise ValueError("stop")
    assert [one.name for one in path.iterdir()] == ["result"]
    with shared_work.work_directory(path):
        assert (path / "result").exists()
    assert not path.exists()
    # an attempt without results leaves nothing
    with pytest.raises(ValueError, match="stop"), shared_work.work_directory(path):
        raise ValueError("stop")
    assert not list(tmp_path.iterdir())


def test_directories_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "cache" / "work" / "left").mkdir(parents=True)
    with shared_work.work_directory(tmp_path / "cache" / "work") as path:
        assert not list(path.iterdir())
