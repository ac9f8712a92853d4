"""Ray's log lines go to a file of the run, also those from before the run had a folder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ngsgd.launcher.ray.session import RayLog


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
