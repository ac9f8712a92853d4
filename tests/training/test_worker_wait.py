"""The wait for workers that are missing, and a clock without the absences of this process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ngsgd.cluster.process import activity_of
from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError
from ngsgd.training import worker_wait
from ngsgd.training.worker_wait import AwakeClock, WorkerWait
from tests.tiers import HANGS_S
from tests.toy import Run, config
from tests.training.test_coordinator import FaultyPool, num_committed

TIMEOUT_S = ClusterConfig().wait_for_workers_s


def waited(alive: Callable[[float], int], busy: Callable[[float], bool] = lambda _now: False) -> tuple[float, list[str]]:
    """When a wait for one of two workers is over, and its lines; five polls a second."""
    lines: list[str] = []
    wait = WorkerWait(TIMEOUT_S, lines.append)
    for step in range(5 * 5000):
        now = step / 5
        if wait.is_over(now, alive(now), 1, 2, lambda now=now: busy(now)):  # type: ignore[misc]
            return now, lines
    return float("inf"), lines


@pytest.mark.entry("Nc13", "no machine of the cluster is left, or its workers take long to import or compile", "works",
                   "A line every 10 s has the number of workers and the time until which the run waits: "
                   "`cluster.wait_for_workers_s` = 600 s after the last sign of life of a worker that starts; then exit code 5")
def test_a_wait_has_lines_and_an_end() -> None:
    end, lines = waited(lambda _now: 0)
    assert end == TIMEOUT_S and len(lines) >= TIMEOUT_S / 10 - 1
    assert all(re.search(r"\b0 of 2\b.* \d\d:\d\d:\d\d$", line) for line in lines)


@pytest.mark.entry("Nc13")
def test_a_machine_that_comes_late_is_not_too_late() -> None:
    assert TIMEOUT_S > 300
    end, lines = waited(lambda now: int(now > TIMEOUT_S - 1))
    assert end == float("inf") and lines
    # each loss has the full time again
    end, _ = waited(lambda now: int(500 < now < 501))
    assert end == pytest.approx(501 + TIMEOUT_S)


@pytest.mark.entry("Nc13")
def test_the_time_counts_from_the_last_sign_of_life() -> None:
    end, _ = waited(lambda _now: 0, lambda now: now < 2000)
    assert 2000 <= end - TIMEOUT_S + 10 < 2020


def test_a_process_that_computes_or_compiles_is_busy() -> None:
    spins = subprocess.Popen([sys.executable, "-c", "import time\nend = time.process_time() + 60\n"
                                                    "while time.process_time() < end: pass"])
    sleeps = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
    compiles = subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"])
    try:
        assert sleeps.stdout and sleeps.stdout.readline()
        limit = time.monotonic() + HANGS_S
        before, idle = activity_of(spins.pid), activity_of(sleeps.pid)
        while not ((now := activity_of(spins.pid)) and now.is_busy(before)) and time.monotonic() < limit:
            pass
        while not ((child := activity_of(compiles.pid)) and child.has_child) and time.monotonic() < limit:
            pass
        still = activity_of(sleeps.pid)
        assert now and now.is_busy(before) and child and child.is_busy(None)
        assert still and not still.is_busy(idle) and not still.is_busy(None)
    finally:
        for process in (*psutil.Process(compiles.pid).children(), spins, sleeps, compiles):
            process.kill()
            process.wait()
    assert activity_of(spins.pid) is None


@pytest.mark.entry("Nc13")
def test_a_run_without_workers_reports_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_wait, "EVERY_S", 0.0)
    run = Run(tmp_path, config(cluster=ClusterConfig(num_workers=2, wait_for_workers_s=0.05)))
    pool = FaultyPool(run, lambda result: time.sleep(0.1) or result)  # type: ignore[func-returns-value]
    pool.num_workers_alive = lambda: 0 if num_committed(run) >= 2 else 2  # type: ignore[method-assign]
    lines: list[str] = []
    run.report = lines.append
    with pytest.raises(ClusterError, match=r"cluster\.wait_for_workers_s"):
        run.train(pool)
    assert any("0 of 2" in line for line in lines) and len(run.recorder.records) >= 2


class _Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_count_and_absences_count_as_the_longest_step() -> None:
    time = _Time()
    clock = AwakeClock(time, longest_step_s=1.0)
    for step_s in (0.2, 1.0, 0.3):
        time.now += step_s
        assert clock.tick() == 0.0
    assert clock.now == pytest.approx(1.5)
    time.now += 60.0
    assert clock.tick() == 59.0
    assert clock.now == pytest.approx(2.5)
    time.now += 0.5
    assert clock.tick() == 0.0
    assert clock.now == pytest.approx(3.0)


def test_other_work_of_this_process_counts() -> None:
    time = _Time()
    clock = AwakeClock(time, longest_step_s=1.0)
    time.now += 10.0
    clock.catch_up()
    assert clock.now == 10.0
    assert clock.tick() == 0.0
