"""Simulated clusters: the bits of one process, events of a seed, and times as by the formulas."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.config import ClusterConfig, FailureConfig, OuterConfig, RunConfig, ScheduleConfig
from ngsgd.planning.planner import Link, Spread, retry_wait_s, straggler_factor
from ngsgd.planning.simulated_cluster import SimulatedCluster, expected
from ngsgd.planning.simulator import SimulatedPool
from ngsgd.schedules import Shard
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.coordinator import Coordinator, RunControl, RunStorage
from ngsgd.training.job import Job, JobFailure, JobInit, JobResult, LocalRef, WorkItem
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.records import Trackers
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.checkpoint import Checkpoint, first_checkpoint
from ngsgd.training.storage.event_log import EventLog
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker import Place, Worker, never, np_empty
from tests.toy import Run, config, undisturbed

UNTIRING = FailureConfig(max_attempts=1000)  # no shard is ever given up
MISHAPS = SimulatedCluster(rate=300.0, spread=Spread(0.3, 0.2), overhead_s=0.1, failures_per_worker_hour=900.0, hang_share=0.3,
                           replace_s=1.5, seed=7)


class Idler(Worker):
    """Returns what a job starts from: where only time matters, learning is not needed."""

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        sent: Vector = job.start.model.read()
        return JobResult(job, self.index, LocalRef(sent), digest(sent), 300, 5, -1.0, 0.5, 0.0, 0.0, 0.0, 0)


def jobs(number: int, **schedule: Any) -> RunConfig:
    settings = {"num_jobs_initial": number, "num_jobs_final": number, **schedule}
    return config(schedule=replace(config().schedule, **settings), cluster=ClusterConfig(num_workers=number),
                  failure=UNTIRING)


def simulate(folder: Path, run_config: RunConfig, cluster: SimulatedCluster,
             make_worker: Callable[[SpeechTaskSpec, int], Worker] = Worker) -> tuple[Run, SimulatedPool, Checkpoint]:
    folder.mkdir(exist_ok=True)
    run = Run(folder, run_config)
    pool = SimulatedPool(run.spec, cluster, run.config.cluster.num_workers, 1, make_worker=make_worker)
    log, ledger = EventLog(folder / "events.jsonl"), Ledger(run.ledger_path)
    pool.start()
    coordinator = Coordinator(
        run.spec.task(), run.model, run.schedule, pool, RunStorage(run.store, ledger, Trackers([log, run.recorder])),
        run.spec.settings, RunControl(clock=pool.clock))
    end = coordinator.train(first_checkpoint(run.store.layout.flatten(run.model.state_dict())))
    log.close("FINISHED")
    ledger.close()
    return run, pool, end


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_whatever_fails_the_model_is_that_of_one_process(tmp_path: Path, seed: int) -> None:
    whole = undisturbed(jobs(3))
    run, pool, end = simulate(tmp_path / "simulated", jobs(3), replace(MISHAPS, seed=seed))
    assert pool.books.num_deaths > 3
    assert end.model_sha256 == whole.model_sha256
    assert audit(run.ledger_path) == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_events_and_another_seed_others(tmp_path: Path) -> None:
    logs = []
    for name, seed in (("first", 7), ("second", 7), ("third", 8)):
        simulate(tmp_path / name, jobs(3), replace(MISHAPS, seed=seed))
        logs.append([(tmp_path / name / file).read_text() for file in ("events.jsonl", "ledger.jsonl")])
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


@pytest.mark.slow
def test_hangs_are_ended_by_the_coordinators_own_deadline(tmp_path: Path) -> None:
    cluster = replace(MISHAPS, failures_per_worker_hour=1800.0, hang_share=1.0)
    run, pool, _ = simulate(tmp_path, jobs(3), cluster)
    told = [incident.message for incident in run.recorder.incidents]
    assert pool.books.num_hangs >= len(told) > 0
    # 30 s, or four times that where all workers hang at once
    assert all("no progress for 30 s" in message or "no progress for 120 s" in message for message in told)
    # the outer iteration of a hang lasts as long as the deadline, on the virtual clock
    assert max(record.compute_s for record in run.recorder.records) > 30.0


def rounds(tmp_path: Path, cluster: SimulatedCluster, num_jobs: int, num_rounds: int) -> tuple[SimulatedPool, list[float], float]:
    """Seconds of rounds in which every worker has one untrained job, and the frames of a job."""
    run = Run(tmp_path, jobs(num_jobs))
    pool = SimulatedPool(run.spec, cluster, num_jobs, 1, make_worker=Idler)
    pool.start()
    model = pool.publish(lambda vector: vector.fill(0.0))
    piece, seconds = WorkItem(Shard(0, 0), 0, 0), []
    for number in range(num_rounds):
        began = pool.clock()
        for job in range(num_jobs):
            pool.submit(Job(number, job, 1, (piece,), JobInit(model), 0.01, 1.0))
        for _ in range(num_jobs):
            while pool.wait(0.2) is None:
                pass
        seconds.append(pool.clock() - began)
    return pool, seconds, float(run.reader.num_frames(piece.shard))


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "num_jobs"), [(0.05, 8), (0.2, 32)])
def test_rounds_take_the_planners_straggler_factor(tmp_path: Path, sigma: float, num_jobs: int) -> None:
    # seeded; 300 rounds: the standard error of the mean is below 0.9 %, and the formula is off by
    # up to 0.7 %. `step` is the spread of one minibatch: over the five of a job it averages out to
    # sigma
    cluster = SimulatedCluster(rate=1000.0, spread=Spread(0.0, sigma * 5 ** 0.5), overhead_s=0.05)
    _, seconds, frames = rounds(tmp_path, cluster, num_jobs, 300)
    told = 0.05 + frames / 1000.0 * straggler_factor(sigma, num_jobs)
    assert statistics.fmean(seconds) == pytest.approx(told, rel=0.02)


def test_a_slow_machine_stays_slow(tmp_path: Path) -> None:
    _, seconds, _ = rounds(tmp_path, SimulatedCluster(spread=Spread(0.3, 0.0)), 4, 5)
    assert seconds == pytest.approx([seconds[0]] * 5, rel=1e-9)
    assert SimulatedCluster(spread=Spread(0.3, 0.0)).pace(0) != SimulatedCluster(spread=Spread(0.3, 0.0)).pace(1)


# by the coordinator: four models out, four results in, and their sum; by the workers: three
# quarters of the results and of the model, the new state (two arrays), and the sum of shards
@pytest.mark.parametrize(("num_arrays", "latencies", "sent", "added"), [(0, 2, 8.0, 4), (2, 3, 0.75 + 0.75 + 2, 3)])
def test_without_randomness_an_outer_iteration_follows_the_formulas(
        tmp_path: Path, num_arrays: int, latencies: int, sent: float, added: int) -> None:
    link = Link(bandwidth=2e4, latency_s=0.01, add_speed=1e6)
    cluster = SimulatedCluster(rate=500.0, overhead_s=0.25, link=link, num_arrays=num_arrays)
    run, pool, end = simulate(tmp_path, jobs(4), cluster, Idler)
    average_s = latencies * link.latency_s + end.parameters.nbytes * (sent / link.bandwidth + added / link.add_speed)
    for record in run.recorder.records:
        longest = max(run.reader.num_frames(Shard(a, f)) for a in range(3) for f in range(4)) / 500.0
        assert record.average_s == pytest.approx(average_s, rel=1e-9)
        assert 0.25 + 0.9 * longest < record.compute_s <= 0.25 + longest + 1e-9
        told = expected(cluster, run.config, num_jobs=4, samples=max(job.seconds for job in record.jobs) * 500.0,
                        model_bytes=end.parameters.nbytes)
        assert record.compute_s + record.average_s == pytest.approx(told.outer_iter_s, rel=1e-6)
    assert pool.clock() == pytest.approx(sum(r.compute_s + r.average_s for r in run.recorder.records), rel=1e-9)


def test_overlap_hides_the_average(tmp_path: Path) -> None:
    slow_link = SimulatedCluster(rate=500.0, link=Link(bandwidth=1.2e5, latency_s=0.0, add_speed=8e9))
    _, plain, _ = simulate(tmp_path / "plain", jobs(2), slow_link, Idler)
    run, hidden, _ = simulate(tmp_path / "hidden", replace(jobs(2), outer=OuterConfig(overlap=True)), slow_link, Idler)
    average_s = run.recorder.records[0].average_s
    num_hidden = len(run.recorder.records) - 1  # nothing follows the last one
    # and a little more: jobs differ by some frames, and where nobody waits that evens out
    assert plain.clock() - hidden.clock() == pytest.approx(num_hidden * average_s, rel=0.1)


@pytest.mark.slow
def test_a_worker_keeps_the_fraction_of_the_formula(tmp_path: Path) -> None:
    # seeded; a job takes T = 0.3 s, lam T = 0.1, R = T / 2. 2000 jobs have about 210 failures: the
    # lost share of 0.091 has a standard error of 0.006, and second order adds 0.004
    run = Run(tmp_path, jobs(1))
    piece = WorkItem(Shard(0, 0), 0, 0)
    job_s = run.reader.num_frames(piece.shard) / 1000.0
    cluster = SimulatedCluster(rate=1000.0, failures_per_worker_hour=360.0 / job_s, replace_s=job_s / 2, seed=3)
    pool = SimulatedPool(run.spec, cluster, 1, 1, make_worker=Idler)
    pool.start()
    job = Job(0, 0, 1, (piece,), JobInit(pool.publish(lambda vector: vector.fill(0.0))), 0.01, 1.0)
    num_done = 0
    while num_done < 2000:
        if pool.num_idle():
            pool.submit(job)
        num_done += isinstance(pool.wait(1e9), JobResult)
    # a failure loses half a job on average, and the time to replace the worker
    kept = 1.0 / (1.0 + 0.1 / job_s * (job_s / 2 + job_s / 2))
    assert num_done * job_s / pool.clock() == pytest.approx(kept, abs=0.02)
    assert pool.books.shares()["efficiency"] == pytest.approx(kept, abs=0.02)
    assert pool.books.shares()["failures"] == pytest.approx(1.0 - kept, abs=0.02)


@pytest.mark.slow
def test_waiting_for_retried_jobs_follows_the_formula(tmp_path: Path) -> None:
    # seeded; N lam C = 0.4 over 96 outer iterations: some 38 failures, a standard error of some 15
    # % of the wait
    run_config = jobs(4, num_epochs=32.0)
    cluster = SimulatedCluster(rate=1000.0, failures_per_worker_hour=1200.0, replace_s=0.1, seed=5)
    run, pool, _ = simulate(tmp_path, run_config, cluster, Idler)
    _, calm, _ = simulate(tmp_path / "calm", run_config, replace(cluster, failures_per_worker_hour=0.0), Idler)
    num = len(run.recorder.records)
    told = retry_wait_s(1200.0 / 3600.0, 4, calm.clock() / num, 0.1)
    assert (pool.clock() - calm.clock()) / num == pytest.approx(told, rel=0.45)
    assert calm.books.shares()["failures"] == 0.0


def test_every_worker_second_is_accounted_for(tmp_path: Path) -> None:
    link = Link(bandwidth=1e5, latency_s=0.01, add_speed=8e9)
    _, pool, _ = simulate(tmp_path, jobs(3), replace(MISHAPS, link=link), Idler)
    shares = pool.books.shares()
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(0.0 < share < 1.0 for share in shares.values())
    assert pool.books.total_s == pytest.approx(3 * pool.clock())


@pytest.mark.slow
def test_with_shares_by_speed_a_slow_worker_has_less_to_do_and_the_round_is_shorter(tmp_path: Path) -> None:
    cluster = SimulatedCluster(rate=300.0, spread=Spread(0.5, 0.0), seed=2)
    paces = [cluster.pace(worker) for worker in range(3)]
    slow = int(np.argmax(paces))
    assert max(paces) > 1.3 * min(paces)
    size = {"minibatch_size": 16, "num_epochs": 2.0}
    equal, _, _ = simulate(tmp_path / "equal", jobs(3, **size), cluster)
    speed, _, _ = simulate(tmp_path / "speed", jobs(3, **size, load_balancing="speed"), cluster)
    first, *later = speed.recorder.records[:-1]
    # nobody is known yet
    assert first.compute_s == pytest.approx(equal.recorder.records[0].compute_s, rel=0.1)
    for record in later:
        assert record.skew < 0.15
        assert record.compute_s < 0.85 * max(one.compute_s for one in equal.recorder.records)
        frames = {job.worker: job.num_frames for job in record.jobs}
        assert frames[slow] == min(frames.values())


@pytest.mark.slow
def test_with_shares_by_time_outer_iterations_are_as_long_as_set(tmp_path: Path) -> None:
    cluster = SimulatedCluster(rate=300.0, spread=Spread(0.5, 0.1), seed=2)
    run, _, _ = simulate(tmp_path, jobs(3, minibatch_size=16, load_balancing="time", sync_interval_s=0.8), cluster)
    full = [record.compute_s for record in run.recorder.records[1:-2]]
    # the wish to end is looked at every 0.2 s, and a minibatch takes some 0.05 s
    assert len(full) >= 2 and all(0.8 <= seconds < 1.2 for seconds in full)
    # what the end of an outer iteration cuts off comes back: every frame is counted once
    num_frames = sum(run.reader.num_frames(Shard(archive, frame)) for archive in range(3) for frame in range(4))
    assert run.recorder.records[-1].frames_processed == num_frames


def test_an_elastic_run_continues_with_fewer_jobs_until_the_worker_is_back(tmp_path: Path) -> None:
    elastic = replace(jobs(4, num_epochs=6.0), cluster=ClusterConfig(num_workers=4, elastic=True))
    cluster = SimulatedCluster(rate=300.0, failures_per_worker_hour=60.0, replace_s=3.0, seed=1)
    run, pool, _ = simulate(tmp_path, elastic, cluster, Idler)
    counts = [record.num_jobs for record in run.recorder.records]
    assert pool.books.num_deaths > 0
    assert set(counts[:-1]) >= {3, 4}
    assert 4 in counts[counts.index(3):]
    assert audit(run.ledger_path) == []


def test_an_idle_worker_that_dies_fails_no_job(tmp_path: Path) -> None:
    run = Run(tmp_path, jobs(2))
    pool = SimulatedPool(run.spec, SimulatedCluster(failures_per_worker_hour=1.0, replace_s=10.0), 2, 1, make_worker=Idler)
    pool.start()
    while pool.num_workers_alive() == 2:
        assert pool.wait(60.0) is None
    assert pool.num_idle() == 1
    assert pool.wait(10.0) is None and pool.num_idle() == 2


def submitted(tmp_path: Path, num_workers: int) -> SimulatedPool:
    """A pool with one job of each of as many outer iterations."""
    run = Run(tmp_path, jobs(num_workers))
    pool = SimulatedPool(run.spec, SimulatedCluster(rate=64.0), num_workers, 1)
    pool.start()
    model = pool.publish(lambda vector: vector.fill(0.0))
    for outer_iter in range(num_workers):
        work = WorkItem(Shard(0, 0), outer_iter, 0)
        pool.submit(Job(outer_iter, 0, 1, (work,), JobInit(model), 0.01, 1.0))
    return pool


def test_a_stopped_job_ends_after_the_current_minibatch(tmp_path: Path) -> None:
    pool = submitted(tmp_path, 1)
    assert pool.wait(1.5) is None
    pool.stop_jobs(0)
    result = pool.wait(10.0)
    assert isinstance(result, JobResult) and not isinstance(result, JobFailure)
    assert result.num_minibatches == 2 and result.remainder
    assert pool.clock() == pytest.approx(2.0, rel=0.05)
    assert result.seconds == pytest.approx(pool.clock())


def test_jobs_of_the_next_outer_iteration_do_not_end_with_the_time_of_this_one(tmp_path: Path) -> None:
    pool = submitted(tmp_path, 2)
    pool.stop_jobs(0)
    first, second = pool.wait(60.0), pool.wait(60.0)
    assert isinstance(first, JobResult) and first.job.outer_iter == 0 and first.remainder
    assert isinstance(second, JobResult) and second.job.outer_iter == 1 and not second.remainder


def test_fewer_jobs_than_workers_are_no_loss(tmp_path: Path) -> None:
    ramp = config(schedule=ScheduleConfig(num_epochs=1.0, minibatch_size=64, num_jobs_initial=1, num_jobs_final=4),
                  cluster=ClusterConfig(num_workers=4))
    _, pool, _ = simulate(tmp_path, ramp, SimulatedCluster(rate=300.0), Idler)
    assert pool.books.shares()["efficiency"] > 0.95
