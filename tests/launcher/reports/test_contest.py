"""Runs that `ngsgd compare` trains itself: which, under which names, and the files they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ngsgd.launcher import cli
from ngsgd.launcher.config import compose
from ngsgd.launcher.reports import sweep_runner
from ngsgd.runs.run_folder import RunFolder
from tests.launcher.reports.test_report import make_run


def test_runs_of_a_sweep_are_named_by_the_settings_that_vary() -> None:
    runs = compose.each_of_sweep(["recipe=digits", "optimizer=ngsgd,kfac", "seed=1,2"])
    assert [sweep_runner.run_name(swept) for _, swept in runs] == ["ngsgd-s1", "ngsgd-s2", "kfac-s1", "kfac-s2"]
    assert runs[2][0] == ["recipe=digits", "optimizer=kfac", "seed=1"]
    assert sweep_runner.run_name(["model.dropout_schedule='0.1,0.1'"]) == "_0.1_0.1_"
    assert sweep_runner.run_name([]) == "run"


class Training:
    """Replaces `launcher train`: a process that leaves the files of a run, or fails.

    It holds 60 MiB until somebody has measured them.
    """

    def __init__(self, root: Path, failing: str) -> None:
        self.root, self.failing = root, failing
        self.real = subprocess.Popen

    def __call__(self, command: list[str], **kwargs: Any) -> Any:
        assert command[1:5] == ["-m", "ngsgd.launcher", "train", "--quiet"]
        name = next(line for line in command if line.startswith("name=")).partition("=")[2]
        fails = name == self.failing
        if not fails:
            make_run(self.root, name)
        if fails:
            return self.real([sys.executable, "-c", "raise SystemExit(1)"], **kwargs)
        self.measured = self.root / f"{name}.measured"
        return self.real([sys.executable, "-c", _HOLDS_MEMORY, str(self.measured)], **kwargs)

    def resident(self, process: psutil.Process) -> int:
        size = int(process.memory_info().rss)
        if size >= 60 * 2**20:
            self.measured.touch()
        return size


_HOLDS_MEMORY = """
import os, sys, time
held = b"1" * (60 << 20)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_settings_are_trained_and_compared_with_runs_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "old")
    training = Training(tmp_path, failing="shampoo")
    monkeypatch.setattr(subprocess, "Popen", training)
    monkeypatch.setattr(sweep_runner, "_resident", training.resident)
    assert cli.main(["compare", "old", "optimizer=ngsgd,kfac,shampoo", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["runs"]
    assert [run["run"].rpartition("-2026")[0] for run in found] == ["old", "ngsgd", "kfac"]
    assert "shampoo failed" in said.err and "run 2 of 3: kfac" in said.err
    assert found[0]["peak_resident_mib"] is None
    # an interpreter takes about 10 MiB, this process several hundred
    assert all(60 <= run["peak_resident_mib"] <= 200 for run in found[1:])
    assert all(run["frames_per_s"] > 0 for run in found)
    assert json.loads(RunFolder.open(next((tmp_path / "runs").glob("kfac-*"))).measured.read_text())["whole_s"] > 0.0


def test_wrong_settings_are_reported_before_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Training(tmp_path, failing="run"))
    assert cli.main(["compare", "optimizer=ngsgd,kfak"]) == 2
    assert "kfak" in capsys.readouterr().err
    assert cli.main(["compare", "optimizer=ngsgd"]) == 2
    assert "runs" in capsys.readouterr().err
