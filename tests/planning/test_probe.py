"""The probe: its settings, its clock, and its end whatever its workers do."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ngsgd.config import ClusterConfig, ScheduleConfig
from ngsgd.data.archives import archive_name
from ngsgd.errors import ClusterError, DataError
from ngsgd.planning import probe
from ngsgd.planning.planner import Machine, Workload
from ngsgd.planning.probe import ProcessLayout, TimedJob, Watch, fullest, settings_to_measure, timed, workers
from ngsgd.training.worker import Worker
from tests.toy import Run, config

# 75 minibatches of 4 frames: long enough to have a steady part
MANY_MINIBATCHES = ScheduleConfig(num_epochs=1.0, minibatch_size=4, num_jobs_initial=2, num_jobs_final=2)


@pytest.mark.parametrize(("num_cores", "num_gpus", "threads", "expected"), [
    (1, 0, 0, [(1, 1), (2, 1)]),
    (2, 0, 0, [(1, 1), (1, 2), (2, 1), (4, 1)]),
    (6, 0, 0, [(1, 1), (1, 6), (2, 3), (4, 1), (6, 1), (12, 1)]),
    # two per core would be too many processes
    (16, 0, 0, [(1, 1), (1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]),
    (8, 0, 4, [(1, 4), (2, 4), (4, 4)]),
    (200, 0, 0, [(1, 1), (1, 200), (2, 100), (4, 50), (8, 25), (16, 12), (32, 6), (64, 3)]),
    (16, 2, 0, [(1, 1), (1, 16), (2, 8), (4, 4)])])
def test_settings_go_from_one_worker_to_all_cores_and_beyond(
        num_cores: int, num_gpus: int, threads: int, expected: list[tuple[int, int]]) -> None:
    run_config = config(cluster=ClusterConfig(threads_per_worker=threads))
    settings = settings_to_measure(run_config, num_cores=num_cores, num_gpus=num_gpus)
    assert settings == [ProcessLayout(*one) for one in expected]


def test_the_fullest_setting_has_no_worker_waiting_for_a_core() -> None:
    settings = settings_to_measure(config(cluster=ClusterConfig()), num_cores=6, num_gpus=0)
    assert fullest(settings, num_cores=6, num_gpus=0) == ProcessLayout(6, 1)
    assert fullest([ProcessLayout(1, 4), ProcessLayout(2, 4), ProcessLayout(4, 4)], num_cores=8, num_gpus=0) == ProcessLayout(2, 4)


class FakeClock:
    """Minibatches take 5 s while the Fisher estimates warm up, then 1 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def job(self, watch: Watch, most: int) -> tuple[int, float]:
        """(minibatches, seconds) of a job that is stopped or has done `most`, and 3 s more."""
        for done in range(1, most + 1):
            self.now += 5.0 if done <= 11 else 1.0
            if watch():
                break
        self.now += 3.0
        return done, self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(time, "perf_counter", fake.perf_counter)
    return fake


def test_steps_are_timed_after_the_warm_up_and_the_rest_is_fixed(clock: FakeClock) -> None:
    watch = Watch(deadline=1e9, uses_gpu=False)
    done, seconds = clock.job(watch, 100)
    step_s = watch.step_s(seconds, done)
    assert (done, step_s) == (100, 1.0)
    assert seconds - done * step_s == 11 * 4.0 + 3.0
    # of a few minibatches it is their mean
    short, clock.now = Watch(deadline=1e9, uses_gpu=False), 0.0
    done, seconds = clock.job(short, 4)
    assert short.step_s(seconds, done) == (4 * 5 + 3) / 4


def test_a_long_job_is_cut_short_once_two_marks_exist(clock: FakeClock) -> None:
    late, early = Watch(deadline=70.0, uses_gpu=False), Watch(deadline=0.0, uses_gpu=False)
    assert clock.job(late, 10000)[0] == 27   # the first mark after 55 + 15 s
    assert late.step_s(1.0, 27) == 1.0
    clock.now = 0.0
    assert clock.job(early, 10000)[0] == 19  # 11 for the warm-up and 8 to measure a step


def test_a_real_job_is_taken_apart_without_rest(tmp_path: Path) -> None:
    run = Run(tmp_path, config(schedule=MANY_MINIBATCHES))
    coordinator = probe.ProbeCoordinator(run.config, run.spec.task(), tmp_path / "scratch", 1)
    worker = Worker(run.spec, 0)
    job = coordinator.make_job(0, 2)
    whole = timed(worker, TimedJob(job, 1, limit_s=60.0))
    assert whole.num_minibatches == math.ceil(run.reader.num_frames(job.shard) / 4)
    assert whole.step_s > 0.0
    assert whole.seconds == pytest.approx(whole.num_minibatches * whole.step_s + whole.fixed_s) or whole.fixed_s == 0.0
    assert timed(worker, TimedJob(coordinator.make_job(1, 2), 1, limit_s=0.0)).num_minibatches == 19
    assert not np.array_equal(whole.parameters, coordinator.start)  # it did train


def test_jobs_read_one_shard_after_another(tmp_path: Path) -> None:
    run = Run(tmp_path)
    coordinator = probe.ProbeCoordinator(run.config, run.spec.task(), tmp_path / "scratch", 1)
    shards = []
    for _ in range(6):
        shards += [coordinator.make_job(index, 2).shard for index in range(2)]
        coordinator.num_rounds += 1
    assert len(set(shards)) == 12  # 3 archives of 4 frames: every shard once
    assert all(a != b for a, b in pairwise(shards))


@pytest.fixture
def no_process_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_probe_finds_speeds_and_leaves_no_process(tmp_path: Path, no_process_left: None) -> None:
    run = Run(tmp_path, config(schedule=MANY_MINIBATCHES, cluster=ClusterConfig()))
    (tmp_path / "scratch").mkdir()
    machine, workload = probe.measure(run.spec, run.config, num_cores=2, seconds=1.0, scratch=tmp_path / "scratch")
    assert workload == Workload(3600 / (3 * 4), 4, 4 * run.store.layout.size, 3600.0)
    assert [(s.num_processes, s.num_threads) for s in machine.parallel] == [(1, 2), (2, 1), (4, 1)]
    assert [(s.num_processes, s.num_threads) for s in machine.serial] == [(1, 1), (1, 2)]
    assert all(speed.rate > 0.0 and speed.fixed_s >= 0.0 and speed.diagnostics_s > 0.0 for speed in machine.parallel)
    assert min(machine.checkpoint_s, machine.link.bandwidth, machine.link.latency_s, machine.link.add_speed) > 0.0
    assert len(list((tmp_path / "scratch").iterdir())) <= run.config.checkpoint.num_to_keep
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.slow
def test_an_error_of_a_worker_ends_the_probe_with_its_message(tmp_path: Path, no_process_left: None) -> None:
    run = Run(tmp_path)
    (tmp_path / "scratch").mkdir()
    for archive in range(run.reader.info.num_archives):
        (run.egs / archive_name(archive)).write_bytes(b"")
    with pytest.raises(DataError, match="does not match its checksum"):
        probe.measure(run.spec, run.config, num_cores=1, seconds=1.0, scratch=tmp_path / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "timeout_s", "message"), [
    (signal.SIGKILL, 600.0, "ended with code -9"), (signal.SIGSTOP, 0.1, "did not answer within")])
def test_a_worker_that_dies_or_does_not_answer_ends_the_probe(
        tmp_path: Path, no_process_left: None, number: int, timeout_s: float, message: str) -> None:
    run = Run(tmp_path)
    with workers(run.spec, 1, 0) as (worker,):
        assert worker.process.pid
        os.kill(worker.process.pid, number)
        worker.send(np.zeros(1))
        worker.timeout_s = timeout_s
        with pytest.raises(ClusterError, match=message):
            worker.receive()
