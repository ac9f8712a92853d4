"""Real Ray actors: the numbers of one process, and a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from ngsgd.cluster.exchange.shared_memory import SharedSnapshotMemory
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.config import ClusterConfig, FailureConfig
from ngsgd.errors import ClusterError, DataError
from ngsgd.launcher.ray.pool import RayPool, WorkerSlot
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training import worker_wait
from ngsgd.training.job import Job, JobResult, LocalRef, Outcome, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.snapshots.job_snapshots import NUM_BLOCKS
from ngsgd.training.snapshots.packing import HEADER_BYTES, Header
from ngsgd.training.storage.audit import audit
from ngsgd.training.validation.checksums import digest
from tests.cluster.exchange.test_collective import NOWHERE
from tests.tiers import HANGS_S
from tests.toy import Run, config, require_undisturbed
from tests.training.snapshots.jobs import ALWAYS

pytestmark = [pytest.mark.services, pytest.mark.same_process("ray"), pytest.mark.usefixtures("ray_session")]


class PoolThatLosesWorkers(RayPool):
    """Kills the worker of the slot that just got a job, as `kill -9` would."""

    def __init__(self, run: Run, should_kill: Callable[[Job], bool]) -> None:
        super().__init__(run.spec, 1, run.store.layout.size)
        self.should_kill = should_kill
        self.killed: list[int] = []

    def submit(self, job: Job) -> None:
        super().submit(job)
        if self.should_kill(job):
            process_id = next(slot.address.process_id for slot in self._slots if slot.job is job and slot.address)
            os.kill(process_id, signal.SIGKILL)
            self.killed.append(process_id)


def test_ray_and_in_process_give_identical_bits_and_leave_no_process(tmp_path: Path) -> None:
    run = Run(tmp_path / "ray")
    pool = RayPool(run.spec, 1, run.store.layout.size)
    processes: list[int] = []
    publish = pool.publish

    def remember(write: Callable[[Vector], object]) -> VectorRef:
        processes[:] = pool.process_ids()
        return publish(write)
    pool.publish = remember  # type: ignore[method-assign]
    require_undisturbed(run, pool)
    assert len(set(processes)) == 2
    gone, alive = psutil.wait_procs([psutil.Process(p) for p in processes if psutil.pid_exists(p)], timeout=HANGS_S)
    assert not alive, gone


@pytest.mark.entry("Nc1")
@pytest.mark.parametrize("has_kernels", [True, False])
def test_workers_use_kernels_if_the_coordinator_does(has_kernels: bool, tmp_path: Path) -> None:
    run, here = Run(tmp_path / "ray"), Fingerprint.of_this_process(1)
    agreement = Agreement(here.without_machine(), has_kernels=has_kernels)
    run.train(RayPool(run.spec, 1, run.store.layout.size, agreement))
    assert agreement.found is not None
    assert agreement.found.is_without_kernels == (not has_kernels or here.is_without_kernels)


def test_workers_killed_in_an_outer_iteration_cost_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "killed")
    # one, then all at once
    pool = PoolThatLosesWorkers(run, lambda job: job.identity in {(1, 0, 1), (3, 0, 1), (3, 1, 1)})
    require_undisturbed(run, pool)
    assert len(pool.killed) == 3
    assert [i.what for i in run.recorder.incidents] == ["worker_died"] * 3
    assert f"process {pool.killed[0]} on " in run.recorder.incidents[0].message
    assert "retried" in run.recorder.incidents[0].message


class PoolThatWaitsForSnapshots(PoolThatLosesWorkers):
    """Kills a worker after the first snapshot of its job."""

    def submit_to(self, job: Job, worker: int) -> None:
        lend, taken = self._snapshots.lend, list[SharedSnapshotMemory]()

        def remember(job: Job, worker: int) -> SharedSnapshotMemory | None:
            memory = lend(job, worker)
            assert memory is not None
            taken.append(memory)
            return memory
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._snapshots, "lend", remember)
            super().submit_to(job, worker)
        while self.should_kill(job) and not any(Header.decode(taken[0].block(index)[:HEADER_BYTES].tobytes())
                                                for index in range(NUM_BLOCKS)):
            time.sleep(0.0)


def test_a_job_continues_at_the_snapshot_of_a_killed_worker(tmp_path: Path) -> None:
    slow = replace(config().schedule, minibatch_size=2)
    run = Run(tmp_path, config(schedule=slow, failure=ALWAYS))
    pool = PoolThatWaitsForSnapshots(run, lambda job: job.identity in {(1, 0, 1), (2, 1, 1)})
    require_undisturbed(run, pool, config(schedule=slow))
    assert sum(job.continued_at > 0 for record in run.recorder.records for job in record.jobs) == 2


def test_a_worker_killed_while_it_keeps_its_result_costs_nothing(tmp_path: Path) -> None:
    cluster = ClusterConfig(num_workers=2, threads_per_worker=1, exchange="collective")
    run = Run(tmp_path / "killed", config(cluster=cluster))

    class Pool(RayPool):
        def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo) -> bool:
            if results[0].job.identity == (2, 0, 1) and results[1].job.attempt == 1:
                os.kill(self.process_ids()[1], signal.SIGKILL)
            return super().step(optimizer, results, weights, info)
    require_undisturbed(run, Pool(run.spec, 1, run.store.layout.size), config())
    (incident,) = run.recorder.incidents
    assert "and its result with it" in incident.message and "retried" in incident.message


@pytest.mark.parametrize(("exchange", "compression"), [
    ("collective", "none"), ("object_store", "none"), ("shared_memory", "sparse"),
    ("collective", "sparse"), ("object_store", "sparse")])
def test_every_exchange_gives_the_bits_of_one_process(
        tmp_path: Path, exchange: Any, compression: Any) -> None:
    cluster = ClusterConfig(num_workers=2, threads_per_worker=1, exchange=exchange,
                            compression=compression)
    run = Run(tmp_path, config(cluster=cluster))

    class Pool(RayPool):
        """With collectives, its workers can read only the first model from the coordinator."""

        def _portable(self, slot: WorkerSlot, ref: VectorRef) -> VectorRef:
            is_model = slot.job is not None and slot.job.outer_iter > 0 and ref is slot.job.start.model
            return NOWHERE if is_model and exchange == "collective" else super()._portable(slot, ref)
    require_undisturbed(run, Pool(run.spec, 1, run.store.layout.size))
    assert run.recorder.incidents == []


def test_a_worker_that_cannot_read_its_data_reports_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.spec = replace(run.spec, egs_directory=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere is not a directory of examples"):
        run.train(RayPool(run.spec, 1, run.store.layout.size))


def test_a_node_that_does_not_see_the_data_is_named_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pool = RayPool(run.spec, 1, run.store.layout.size, folders=[str(run.egs), str(tmp_path / "nowhere")])
    with pytest.raises(ClusterError) as caught:
        run.train(pool)
    assert {os.uname().nodename, str(tmp_path / "nowhere")} <= set(re.findall(r"[^\s(),;]+", str(caught.value)))
    assert ray.util.get_node_ip_address() in str(caught.value)
    assert run.recorder.records == []
    run.train(RayPool(run.spec, 1, run.store.layout.size, folders=[str(run.egs)]))


def test_a_replacement_that_does_not_see_the_data_is_not_used(tmp_path: Path) -> None:
    one = ClusterConfig(num_workers=1, threads_per_worker=1)
    run, shared = Run(tmp_path / "run", config(cluster=one, failure=FailureConfig(max_attempts=2))), tmp_path / "shared"
    shared.mkdir()

    def should_kill(job: Job) -> bool:
        # the node of the next process does not see it
        if is_first := shared.exists() and job.outer_iter == 1:
            shared.rmdir()
        return is_first

    pool = PoolThatLosesWorkers(run, should_kill)
    pool.folders = [str(shared)]
    with pytest.raises(ClusterError, match=str(shared)):
        run.train(pool)
    assert len(pool.killed) == 1
    assert audit(run.ledger_path) == []
    found = {incident.what for incident in run.recorder.incidents} | {incident.what for incident in pool.retired()}
    assert "worker_refused" in found


def test_workers_that_do_not_come_are_given_up_on(tmp_path: Path) -> None:
    # the session has 8 cores
    too_many = ClusterConfig(num_workers=2, threads_per_worker=5, wait_for_workers_s=1.0)
    run = Run(tmp_path, config(cluster=too_many))
    with pytest.raises(ClusterError, match=r"cluster\.wait_for_workers_s"):
        run.train(RayPool(run.spec, 5, run.store.layout.size))


def test_a_worker_with_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr("ngsgd.cluster.fingerprint.code_digest", lambda: "other")
    with pytest.raises(ClusterError, match="code: other"):
        run.train(RayPool(run.spec, 1, run.store.layout.size))


@dataclass(frozen=True)
class CompilingSpec(SpeechTaskSpec):
    """A task whose start in a worker waits for a compiler."""

    coordinator: int = 0

    def task(self, device: torch.device | None = None) -> Any:
        if os.getpid() != self.coordinator:
            subprocess.run(["sleep", "20"], check=True)
        return super().task(device)


@pytest.mark.entry("Nc13")
def test_workers_that_compile_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_wait, "EVERY_S", 0.5)
    run = Run(tmp_path / "run", config(cluster=ClusterConfig(num_workers=2, wait_for_workers_s=15.0)))
    spec = CompilingSpec(run.config, run.spec.egs_directory, coordinator=os.getpid())
    lines: list[str] = []
    require_undisturbed(run, RayPool(spec, 1, run.store.layout.size, report=lines.append), config())
    assert any("0 of 2" in line for line in lines)


class WrongBit(RayPool):
    """The results of worker 1 have a wrong bit."""

    def wait(self, timeout_s: float) -> Outcome | None:
        outcome = super().wait(timeout_s)
        if not isinstance(outcome, JobResult) or outcome.worker != 1:
            return outcome
        vector = outcome.sent.read().copy()
        vector.view(np.uint32)[0] ^= np.uint32(1)
        self.release(outcome.sent)
        return replace(outcome, sent=LocalRef(vector), digest=digest(vector))


def test_a_ray_worker_with_a_wrong_bit_is_named_and_not_used_again(tmp_path: Path) -> None:
    cluster = ClusterConfig(kind="ray", num_workers=3, threads_per_worker=1)
    run = Run(tmp_path, config(failure=FailureConfig(audit_every=1), cluster=cluster))
    pool = WrongBit(run.spec, 1, run.store.layout.size)
    require_undisturbed(run, pool, config())
    assert [one.worker for one in run.recorder.incidents if one.what == "worker_quarantined"] == [1]
    assert run.recorder.records[-1].workers_alive == 2
