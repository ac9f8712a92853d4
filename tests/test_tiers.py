"""The selection of tests by tier; a slow test is reported and never fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import HANGS_S, LAST_RUN, summary

ROOT = Path(__file__).resolve().parents[1]
# every look at the CPU time finds 1000 s more than the one before
CONFTEST = """
import itertools
from tests import tiers
from tests.tiers import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_protocol, pytest_runtestloop
seconds = itertools.count(step=1000)
tiers._cpu_time_s = lambda: float(next(seconds))
"""
TESTS = """
import pytest

def test_that_is_slow():
    pass

@pytest.mark.slow
def test_that_is_marked():
    pass

@pytest.mark.parametrize("number", range(5))
def test_with_many_cases(number):
    pass

@pytest.mark.parametrize("number", range(4))
def test_with_few_cases(number):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_slow.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=HANGS_S,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_slow_tests_pass_and_are_reported(folder: Path) -> None:
    report = folder / "times.jsonl"
    done = run(folder, f"--cpu-report={report}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(report.read_text().splitlines()) == 11
    listed = summary(report).partition("unmarked")[2]
    assert "test_that_is_slow" in listed and "test_that_is_marked" not in listed


def test_make_test_runs_the_first_of_many_cases(folder: Path) -> None:
    done = run(folder, "--first-cases", "-m", "not slow", "-vv")
    passed = [line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if " PASSED" in line]
    assert passed == ["test_that_is_slow", "test_with_many_cases[0]", *(f"test_with_few_cases[{n}]" for n in range(4))]


def test_the_report_without_a_run_is_one_error(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.tiers", str(tmp_path / "none")], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert LAST_RUN.is_relative_to(ROOT)
