"""Requirements of fault tolerance beyond the matrix.

benchmarks/fault-matrix.md maps requirements to tests.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ngsgd.cluster.messages import Messages
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, FailureConfig
from ngsgd.errors import ClusterError
from ngsgd.files import read_json_lines
from ngsgd.optim.outer import Average, OuterInfo, OuterOptimizer
from ngsgd.training.job import Job, JobInit, JobResult, Outcome, WorkItem
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty, resolve_threads
from tests.chaos.coordinator import Ordeal
from tests.chaos.faults import Breaks, Fault
from tests.chaos.invariants import Surroundings
from tests.chaos.soak import Plan, soak
from tests.chaos.trials import BreaksTwice, all_events, check, impatient, many_workers, reference, run_in, settings
from tests.chaos.watch import WatchedPool
from tests.tiers import HANGS_S
from tests.toy import Run

pytestmark = pytest.mark.faults


class Straggler(Worker):
    """Worker 1 takes `factor` times as long as the others."""

    def __init__(self, spec: TaskSpec, index: int, factor: float) -> None:
        super().__init__(spec, index)
        self.factor = factor if index == 1 else 1.0

    def _train(self, *arguments: object) -> None:
        super()._train(*arguments)  # type: ignore[arg-type]
        time.sleep(0.004 * self.factor)


@pytest.mark.parametrize("factor", [1.12, 10.0])
def test_a_straggler_that_lives_is_never_dropped(tmp_path: Path, factor: float) -> None:
    run = run_in(tmp_path, many_workers())
    around, pool = Surroundings(), WatchedPool(run, make_worker=partial(Straggler, factor=factor))
    run.train(pool)
    check(run, around, within=reference(many_workers()))
    assert all(record.num_accepted == record.num_jobs for record in run.recorder.records[:-1])
    digests = [(line.job, line.worker) for record in run.recorder.records for line in record.jobs if line.accepted]
    assert len(digests) == sum(record.num_accepted for record in run.recorder.records)


def test_a_killed_coordinator_takes_its_hanging_workers_with_it(tmp_path: Path) -> None:
    stopped = Fault("mid shard", "SIGSTOP", str(tmp_path / "worker-struck"), others_wait=True)
    coordinator = Fault("first result in", "SIGKILL", str(tmp_path / "struck"))
    # nobody else would end the worker
    ordeal = Ordeal(tmp_path, settings(), coordinator, uuid.uuid4().hex, Breaks(stopped))
    around = Surroundings(tag=ordeal.tag)
    assert ordeal.run() == -signal.SIGKILL
    assert stopped.strikes() and coordinator.strikes()
    assert around.problems(tmp_path / "nowhere") == []


def test_a_worker_that_does_not_read_blocks_no_other_worker() -> None:
    ours, theirs = socket.socketpair()
    messages, peer = Messages(ours), Messages(theirs)
    large = np.arange(3_000_000)
    messages.post(large)
    # the peer reads nothing yet: had `post` waited for it, it would never return
    was_sent_at_once = not messages.has_unsent
    num_flushes = 0
    received: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: received.append(peer.receive()))
    reader.start()
    while messages.has_unsent:
        messages.flush()
        num_flushes += 1
    reader.join()
    assert not was_sent_at_once
    assert num_flushes > 1
    assert np.array_equal(received[0], large)
    messages.close()
    peer.close()


def test_a_stopped_worker_is_missed_even_if_its_job_is_too_large_to_send(tmp_path: Path) -> None:
    run = run_in(tmp_path, impatient(settings()))
    pool = StopsBeforeLargeJobs(run)
    run.train(pool)
    assert pool.stopped and audit(run.ledger_path) == []
    assert "made no progress" in run.recorder.incidents[0].message


class StopsBeforeLargeJobs(WatchedPool):
    """Stops a worker that is idle, then gives it more than a socket takes."""

    stopped = 0

    def submit(self, job: Job) -> None:
        if job.identity == (2, 1, 1):
            self.stopped = self._slots[1].process.pid or 0
            os.kill(self.stopped, signal.SIGSTOP)
            job = replace(job, start=replace(job.start, fisher={"ballast": {"W": np.zeros(1_000_000)}}))
        super().submit(job)


def hangs_at_start(spec: TaskSpec, index: int, fault: Fault) -> Worker:
    """Make workers of which one never becomes ready the first time."""
    if index == 1:
        fault.strike()
    return Worker(spec, index)


@pytest.mark.parametrize("how", ["SIGSTOP", "MemoryError", "exit 0"])
def test_a_worker_that_fails_while_it_starts_gets_another_try(tmp_path: Path, how: str) -> None:
    run = run_in(tmp_path, impatient(settings()))
    fault = Fault("start", how, str(tmp_path / "struck"))
    around, pool = Surroundings(), WatchedPool(run,
                                make_worker=partial(hangs_at_start, fault=fault))
    run.train(pool)
    assert fault.strikes()
    check(run, around, within=reference(settings()))


def test_a_worker_that_can_never_start_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    fault = Fault("start", "MemoryError", str(tmp_path / "struck"), num_times=99)
    with pytest.raises(ClusterError, match=r"worker 1 died 3 times while starting .*MemoryError: no memory, says the test"):
        run.train(WatchedPool(run, make_worker=partial(hangs_at_start, fault=fault)))


def test_a_replacement_that_cannot_start_does_not_end_a_run_that_has_other_workers(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    first = Fault("mid shard", "SIGKILL", str(tmp_path / "struck"))
    second = Fault("start", "MemoryError", str(tmp_path / "again"), num_times=99)
    around, pool = Surroundings(), WatchedPool(run, first, BreaksTwice(first, second))
    run.train(pool)
    assert first.strikes() and second.strikes()
    check(run, around, within=reference(settings()))


def test_a_preempted_worker_gets_no_more_jobs(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    fault = Fault("first minibatch", "SIGTERM", str(tmp_path / "struck"))
    pool = WatchedPool(run, fault, Breaks(fault))
    run.train(pool)
    ((process_id, struck_s),) = fault.strikes()
    assert not [job for job, process, at_s in pool.submitted if process == process_id and at_s > struck_s]
    assert all_events(run).count("failed") == 1


def test_an_idle_worker_ends_at_once_on_sigterm(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    pool = WatchedPool(run)
    pool.start()
    try:
        before = pool.process_ids()
        os.kill(before[0], signal.SIGTERM)
        deadline = time.monotonic() + HANGS_S
        while pool.process_ids()[0] == before[0] or pool.num_idle() < 2:
            assert time.monotonic() < deadline
            pool.wait(0.05)
    finally:
        pool.close()


def test_a_zombie_s_result_is_discarded_and_counted(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    pool = RepeatsEverything(run)
    run.train(pool)
    discarded = all_events(run).count("discarded")
    assert pool.num_repeated > 5 and discarded == pool.num_repeated
    assert audit(run.ledger_path) == [] and run.store.latest()[0].model_sha256 == reference(settings())  # type: ignore[union-attr]


class RepeatsEverything(WatchedPool):
    """Every result comes twice, the second time when the next outer iteration may be under way."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.late: list[JobResult] = []
        self.num_repeated = 0

    def wait(self, timeout_s: float) -> Outcome | None:
        if len(self.late) > 2:
            self.num_repeated += 1
            return self.late.pop(0)
        outcome = super().wait(timeout_s)
        if isinstance(outcome, JobResult):
            self.late.append(outcome)
        return outcome

    def release(self, ref: object) -> None:
        """No buffer is reused, so that a late result is unchanged."""


def test_two_runs_at_once_on_one_machine_share_nothing(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / name, settings()) for name in ("one", "two")]
    around = Surroundings()
    threads = [threading.Thread(target=run.train, args=(WatchedPool(run),)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs:
        check(run, around, within=reference(settings()))
    assert around.problems(tmp_path) == []   # among them: no port was opened


def test_workers_share_the_cores() -> None:
    for num_cores, num_workers, num_threads in ((8, 2, 4), (2, 16, 1), (7, 2, 3), (1, 1, 1)):
        assert resolve_threads(ClusterConfig(num_workers=num_workers), num_cores) == num_threads
    assert resolve_threads(ClusterConfig(num_workers=4, threads_per_worker=3), 4) == 3


def test_a_worker_uses_the_threads_it_was_given(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    pool = ProcessPool(run.spec, 1, 1, run.store.layout.size, log_directory=tmp_path / "workers", make_worker=SaysThreads)
    run.train(pool)
    assert "threads 1\n" in (tmp_path / "workers" / "worker-0.log").read_text()


class SaysThreads(Worker):
    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        import torch
        print("threads", torch.get_num_threads(), flush=True)
        return super().run(job, place, should_stop)


def test_averaging_64_results_takes_no_more_memory_than_one_model() -> None:
    size = 1_000_000
    vectors = [np.full(size, number, dtype=np.float32) for number in range(64)]
    outer = OuterOptimizer(Average(), np.zeros(size, dtype=np.float32))
    tracemalloc.start()
    outer.step(vectors, [1.0] * 64, OuterInfo(0, 1, 64, 1.0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outer.eval_model()[0] == 31.5
    assert peak < 1.5 * vectors[0].nbytes   # in place, by chunks in double precision


def test_random_numbers_depend_on_the_shard_and_not_on_the_worker(tmp_path: Path) -> None:
    """Other workers and attempts give bitwise identical results."""
    run = run_in(tmp_path, settings())
    pool = WatchedPool(run)
    pool.start()
    try:
        model = pool.publish(lambda out: out.fill(0.01))
        piece = WorkItem(run.schedule.shard(0), 0, 0)
        found = []
        # the job's number decides which worker it goes to first
        for number, attempt in ((0, 1), (1, 1), (1, 7)):
            pool.submit(Job(0, number, attempt, (piece,), JobInit(model), 0.01, 2.0))
            while (outcome := pool.wait(1.0)) is None:
                pass
            assert isinstance(outcome, JobResult)
            found.append((outcome.worker, outcome.digest))
    finally:
        pool.close()
    assert {worker for worker, _ in found} == {0, 1} and len({digest for _, digest in found}) == 1


def test_a_joiner_contributes_only_what_it_trained_itself(tmp_path: Path) -> None:
    """No result appears twice under another name, also not after replacements."""
    run = run_in(tmp_path, many_workers())
    fault = Fault("mid shard", "SIGKILL", str(tmp_path / "struck"))
    run.train(WatchedPool(run, fault, Breaks(fault)))
    digests = [line["digest"] for line in read_json_lines(run.ledger_path) if line["event"] == "accepted"]
    assert len(digests) == len(set(digests))


def test_a_message_names_worker_shard_cause_and_next_step(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    fault = Fault("mid shard", "SIGKILL", str(tmp_path / "struck"))
    run.train(WatchedPool(run, fault, Breaks(fault)))
    (incident,) = run.recorder.incidents
    ((process_id, _),) = fault.strikes()
    assert re.fullmatch(rf"worker 1 died \(process {process_id} killed by SIGKILL\) during job 1 of outer iteration 3, attempt 1; "
                        r"its shard is retried\.", incident.message.split("; end of its log")[0])


def test_a_run_that_ends_names_the_relevant_settings(tmp_path: Path) -> None:
    failure = FailureConfig(on_repeated_crash="stop", max_attempts=1)
    run = run_in(tmp_path, settings(failure=failure))
    fault = Fault("mid shard", "SIGKILL", str(tmp_path / "struck"))
    with pytest.raises(ClusterError, match=r"failure\.on_repeated_crash is stop:"):
        run.train(WatchedPool(run, fault, Breaks(fault)))


def test_there_is_one_line_for_each_outer_iteration_and_one_for_each_event_however_many_workers(tmp_path: Path) -> None:
    run = run_in(tmp_path, many_workers(8))
    fault = Fault("mid shard", "SIGKILL", str(tmp_path / "struck"))
    run.train(WatchedPool(run, fault, Breaks(fault)))
    assert len(run.recorder.records) == run.schedule.num_outer_iters
    assert len(run.recorder.incidents) == 1
    # workers have nothing to say
    assert not [path for path in (tmp_path / "workers").iterdir() if path.read_text()]


def test_with_half_of_the_workers_gone_the_curve_is_that_of_a_run_planned_with_half(tmp_path: Path) -> None:
    """Two outer iterations on 4 jobs, then 2, against 2 from the start, seed 0; untrained models
    have -1.79.

    Over seeds 0 to 5 the last objf of the run planned with half is -0.341 to -0.311 (standard
    deviation 0.011), and the other run is 0.003 to 0.046 below it, since its first outer
    iterations, on 4 jobs, move less.
    """
    elastic = many_workers()
    elastic = replace(elastic, cluster=replace(elastic.cluster, elastic=True))
    lost, half = Run(tmp_path / "lost", elastic), Run(tmp_path / "half", many_workers(2))
    pool = lost.in_process()
    pool.num_workers_alive = lambda: 2 if len(lost.recorder.records) >= 2 else 4  # type: ignore[method-assign]
    lost.train(pool)
    half.train()
    record = lost.recorder.records[3]
    # lr goes with the jobs there are
    assert record.num_jobs == 2 and record.lr == pytest.approx(2 * record.effective_lr)
    assert abs(lost.recorder.records[-1].valid.objf - half.recorder.records[-1].valid.objf) < 0.08


def test_a_full_disk_under_the_ledger_stops_the_run_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path, settings())
    around, write = Surroundings(), Ledger._write

    def full(ledger: Ledger, event: str, **fields: object) -> None:
        if event == "committed" and fields["outer_iter"] == 2:
            raise OSError(28, "No space left on device")
        write(ledger, event, **fields)
    monkeypatch.setattr(Ledger, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        run.train(WatchedPool(run))
    monkeypatch.undo()
    run.train(WatchedPool(run))
    check(run, around, within=reference(settings()))


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    run = run_in(tmp_path, settings())
    left = run.store.directory / ".iter-000001.deadbeef.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    run.train()
    assert not left.exists()


def test_fragments_hold_every_parameter_once_whatever_their_number() -> None:
    chance = np.random.default_rng(0)
    for _ in range(200):
        names = [f"layer{number}.{part}" for number in range(chance.integers(1, 12)) for part in ("weight", "bias")]
        layout = FlatLayout(tuple(names), tuple((int(chance.integers(0, 5)), int(chance.integers(1, 4))) for _ in names))
        count = int(chance.integers(1, 20))
        covered = np.zeros(layout.size, dtype=int)
        for index in range(count):
            for part, _ in layout.fragment(index, count):
                covered[part] += 1
        assert (covered == 1).all()


def test_a_short_soak_loses_nothing_and_keeps_most_of_the_speed() -> None:
    """One or two faults in five seconds on four workers; the full one is `make soak`."""
    plan = Plan(num_workers=4, faulty_s=5.0, num_stretches=1, quiet_s=2.0, job_s=0.3, between_faults_s=(2.0, 2.0))
    with tempfile.TemporaryDirectory() as folder:
        report = soak(plan, Path(folder))
    assert report.problems == []
    assert report.num_faults.total() >= 1
    assert report.tried_again.total() >= 1
