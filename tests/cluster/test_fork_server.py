"""No process outlives its coordinator, and a fork server that hangs is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ngsgd.cluster.fork_server import fork_server
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import FailureConfig
from ngsgd.training.job import Job
from tests.tiers import HANGS_S
from tests.toy import Run, config, require_undisturbed

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]

# Preloaded by the fork server: stops each newborn, before or after the hook of ngsgd.
STOPS_NEWBORN = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))
"""
COORDINATOR = """
import socket, sys, time
from ngsgd.cluster import fork_server as module

ours, theirs = socket.socketpair()
hooks = ["ngsgd.cluster.newborn", "stops_newborn"]
module._PRELOAD[:] = hooks if sys.argv[1] == "after" else hooks[::-1]
one = module.fork_server().launch(time.sleep, (600,), theirs, "newborn")
while one.pid is None:
    time.sleep(0.01)
print(one.pid, flush=True)
time.sleep(600)
"""


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def _wait_for(process: psutil.Process, status: str) -> None:
    deadline = time.monotonic() + HANGS_S
    while process.status() != status:
        assert time.monotonic() < deadline, f"{process} is {process.status()}"
        time.sleep(0.01)


@pytest.mark.parametrize("stopped", ["the newborn", "all"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_stopped_during_its_start_ends_with_the_coordinator(tmp_path: Path, when: str, stopped: str) -> None:
    program = tmp_path / "coordinator.py"
    program.write_text(COORDINATOR)
    (tmp_path / "stops_newborn.py").write_text(STOPS_NEWBORN)
    coordinator = subprocess.Popen([sys.executable, str(program), when], stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"})
    try:
        assert coordinator.stdout is not None
        newborn = psutil.Process(int(coordinator.stdout.readline()))
        _wait_for(newborn, psutil.STATUS_STOPPED)
        family = psutil.Process(coordinator.pid).children(recursive=True)
        # the fork server, and multiprocessing's resource tracker
        assert newborn in family and len(family) == 3
        for one in family if stopped == "all" else ():
            one.send_signal(signal.SIGSTOP)
            _wait_for(one, psutil.STATUS_STOPPED)
    finally:
        coordinator.kill()
        coordinator.communicate()
    deadline = time.monotonic() + HANGS_S
    while (left := [one for one in family if not _is_gone(one)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for one in left:
        one.kill()
    assert not left, left


class StopsTheForkServer(ProcessPool):
    """With a certain job the fork server stops and all workers die."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.spec, 2, 1, run.store.layout.size, log_directory=run.folder / "workers")
        self.stopped = 0

    def submit(self, job: Job) -> None:
        super().submit(job)
        if job.identity == (1, 0, 1):
            self.stopped = fork_server().process_id
            os.kill(self.stopped, signal.SIGSTOP)
            for worker in self.process_ids():
                os.kill(worker, signal.SIGKILL)


def test_a_stopped_fork_server_is_replaced_and_costs_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "stopped", config(failure=FailureConfig(hang_timeout_s=1.5, max_attempts=20)))
    pool = StopsTheForkServer(run)
    require_undisturbed(run, pool, config())
    assert pool.stopped and pool.stopped != fork_server().process_id


def test_a_pool_closes_in_time_though_its_fork_server_is_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pool = ProcessPool(run.spec, 1, 1, run.store.layout.size)
    pool.start()
    (worker,) = pool.process_ids()
    os.kill(fork_server().process_id, signal.SIGSTOP)
    pool.close()
    deadline = time.monotonic() + HANGS_S
    while psutil.pid_exists(worker) and not _is_gone(psutil.Process(worker)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert fork_server().under_way is None
