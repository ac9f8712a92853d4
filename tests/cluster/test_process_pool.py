"""Worker processes of this machine: the numbers of one process, and processes that die or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ngsgd.cluster import restarts
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.cluster.restarts import Restarts
from ngsgd.config import ClusterConfig, FailureConfig, OuterConfig
from ngsgd.errors import ClusterError
from ngsgd.training import worker_wait
from ngsgd.training.job import Job, JobResult, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.storage.audit import audit
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty
from tests.toy import Run, config, require_undisturbed


def pool_of(run: Run, num_workers: int = 2) -> ProcessPool:
    return ProcessPool(run.spec, num_workers, 1, run.store.layout.size, log_directory=run.folder / "workers")


class PoolThatSignals(ProcessPool):
    """Sends a signal to the worker that just got a job."""

    def __init__(self, run: Run, number: int, chosen: Callable[[Job], bool]) -> None:
        super().__init__(run.spec, 2, 1, run.store.layout.size, log_directory=run.folder / "workers")
        self.number = number
        self.chosen = chosen

    def submit(self, job: Job) -> None:
        super().submit(job)
        if self.chosen(job):
            (slot,) = [slot for slot in self._slots if slot.job is job]
            assert slot.process.pid
            os.kill(slot.process.pid, self.number)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [
    OuterConfig("average"), OuterConfig("bmuf", gain=1.5, overlap=True),
    OuterConfig("streaming", num_fragments=2, overlap=True)],
    ids=lambda o: f"{o.kind}-{o.overlap}")
def test_processes_and_one_process_give_identical_bits_and_leave_no_process(tmp_path: Path, outer: OuterConfig) -> None:
    run = Run(tmp_path / "processes", config(outer=outer))
    pool = pool_of(run)
    workers: list[int] = []
    publish = pool.publish

    def remember(write: Callable[[Vector], object]) -> VectorRef:
        workers[:] = pool.process_ids()
        return publish(write)
    pool.publish = remember  # type: ignore[method-assign]
    descriptors = len(os.listdir("/proc/self/fd"))
    require_undisturbed(run, pool)
    assert len(workers) == 2 and not any(map(psutil.pid_exists, workers))
    # the fork server's own, at its first start
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


@pytest.mark.parametrize(("number", "outer"), [
    (signal.SIGKILL, OuterConfig("bmuf", gain=1.5, overlap=True)),
    pytest.param(signal.SIGTERM, OuterConfig("average"), marks=pytest.mark.faults),
    pytest.param(signal.SIGSTOP, OuterConfig("streaming", num_fragments=2), marks=pytest.mark.faults),
    pytest.param(signal.SIGSEGV, OuterConfig("average"), marks=pytest.mark.faults)],
    ids=lambda value: getattr(value, "name", "") or value.kind)
def test_a_signal_to_a_worker_costs_nothing(tmp_path: Path, number: signal.Signals, outer: OuterConfig) -> None:
    # a busy machine may make workers look as if they hung, often
    impatient = FailureConfig(hang_timeout_s=0.5, max_attempts=20)
    run = Run(tmp_path / "signalled", config(failure=impatient, outer=outer))
    pool = PoolThatSignals(run, number, lambda job: job.identity in {(1, 0, 1), (3, 1, 1)})
    require_undisturbed(run, pool, config(outer=outer))


class Talkative(Worker):
    """Report the step and die in it."""

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        if job.identity == (1, 0, 1):
            print("this is the end", flush=True)
            os._exit(7)
        return super().run(job, place, should_stop)


@pytest.mark.faults
def test_the_last_words_of_a_dead_worker_are_quoted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pool = ProcessPool(run.spec, 2, 1, run.store.layout.size, log_directory=run.folder / "workers", make_worker=Talkative)
    run.train(pool)
    (incident,) = run.recorder.incidents
    assert "ended with code 7" in incident.message and "this is the end" in incident.message


def test_a_worker_that_cannot_read_its_data_reports_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.spec = replace(run.spec, egs_directory=str(tmp_path / "nowhere"))
    with pytest.raises(Exception, match="directory"):
        run.train(pool_of(run))


@pytest.mark.faults
def test_rounds_of_fixed_length_lose_nothing(tmp_path: Path) -> None:
    """Their length is tested in simulated time, in tests/planning/test_simulator.py."""
    timed = replace(config().schedule, load_balancing="time", sync_interval_s=0.3, num_epochs=4.0)
    run = Run(tmp_path, config(schedule=timed))
    pool = ProcessPool(run.spec, 2, 1, run.store.layout.size, make_worker=Slow)
    end = run.train(pool)
    assert end.progress.frames_processed == 4 * 3600
    assert audit(run.ledger_path) == []
    assert len(run.recorder.records) >= 3


class Slow(Worker):
    """A minibatch takes 10 ms on even workers and 20 ms on odd ones."""

    def _train(self, *arguments: Any, **named: Any) -> None:
        time.sleep(0.01 * (1 + self.index % 2))
        super()._train(*arguments, **named)


@pytest.mark.faults
@pytest.mark.parametrize("outer", [OuterConfig("average"), OuterConfig("bmuf", overlap=True)], ids=["average", "overlap"])
def test_a_worker_that_dies_too_often_is_not_replaced_and_costs_nothing(
        tmp_path: Path, outer: OuterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MAX_RESTARTS_PER_HOUR", 0)
    run = Run(tmp_path / "killed", config(outer=outer))
    pool = PoolThatSignals(run, signal.SIGKILL, lambda job: (job.outer_iter, job.job, job.attempt) == (1, 1, 1))
    require_undisturbed(run, pool, config(outer=outer))
    (retired,) = [incident for incident in run.recorder.incidents if incident.what == "worker_retired"]
    assert "killed by SIGKILL) and is not replaced, since it was replaced 0 times within an hour" in retired.message


@pytest.mark.faults
def test_a_run_without_a_worker_left_ends_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MAX_RESTARTS_PER_HOUR", 0)
    run = Run(tmp_path, config())
    with pytest.raises(ClusterError, match="no worker is left: each died more than"):
        run.train(PoolThatSignals(run, signal.SIGKILL, lambda job: job.outer_iter == 1))
    assert run.store.latest()[0] is not None  # committed work is kept


class Compiles:
    """A worker whose start waits for a compiler."""

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        subprocess.run(["sleep", "12"], check=True)
        return Worker(spec, index)


@pytest.mark.slow
@pytest.mark.entry("Nc13")
def test_workers_that_compile_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_wait, "EVERY_S", 0.5)
    # the fork server has its time to start
    run = Run(tmp_path / "run", config(cluster=ClusterConfig(num_workers=2, wait_for_workers_s=10.0)))
    lines: list[str] = []
    pool = ProcessPool(run.spec, 2, 1, run.store.layout.size, make_worker=Compiles(), report=lines.append)
    require_undisturbed(run, pool, config())
    assert any("0 of 2" in line for line in lines)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_restarts_are_counted_by_worker_over_the_last_hour() -> None:
    clock = _Clock()
    restarts = Restarts(2, clock)
    assert restarts.allow(0, "x") and restarts.allow(1, "x")
    clock.now = 1800.0
    assert restarts.allow(0, "x")
    assert not restarts.allow(0, "killed by SIGKILL")
    assert [one.worker for one in restarts.news()] == [0]
    assert restarts.news() == []  # each is reported once
    clock.now = 3600.0  # the first one is an hour ago
    assert restarts.allow(0, "x")
    assert not restarts.allow(0, "x")
    assert restarts.allow(1, "x")


def test_minus_one_is_without_limit_and_zero_never() -> None:
    assert all(Restarts(-1).allow(0, "x") for _ in range(1000))
    assert not Restarts(0).allow(0, "x")
