"""Nodes that are drained, and a full object store; Ray's actors are threads of this process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from ngsgd.cluster.exchange.shared_memory import SharedSnapshotStore
from ngsgd.config import ClusterConfig
from ngsgd.errors import WorkerFingerprintError
from ngsgd.launcher.ray.pool import RayPool
from ngsgd.launcher.ray.snapshots import RemoteSnapshotMemory, SnapshotServer
from ngsgd.launcher.ray.worker import RayWorker
from ngsgd.training.job import Job, JobResult, Outcome
from ngsgd.training.worker import Worker
from tests.integration.autoscaled import SlowSpec
from tests.launcher.ray.in_threads import Actor, Cluster
from tests.tiers import HANGS_S
from tests.toy import Run, config, require_undisturbed
from tests.training.snapshots import jobs
from tests.training.snapshots.jobs import ALWAYS

FAR = ClusterConfig(num_workers=2, threads_per_worker=1)
JOINED = replace(FAR, kind="ray", address="10.0.0.1:6379")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster whose workers do not share memory with the coordinator."""
    found = Cluster(monkeypatch)
    prepare = RayWorker.prepare

    def far(worker: RayWorker, *arguments: Any, **options: Any) -> Any:
        address: Any = prepare(worker, *arguments, **options)
        actor = next(actor for actor in found.actors if actor.made is worker)
        return replace(address, node_id=actor.node_id, device=replace(address.device, is_near=False))
    monkeypatch.setattr(RayWorker, "prepare", far)
    monkeypatch.setattr("ngsgd.launcher.ray.capacity.POLL_S", 0.01)
    return found


@pytest.mark.entry("El4", "in the middle of a job its node of the Ray cluster is drained", "works",
                   "the worker takes a snapshot, which the coordinator's machine keeps; another worker continues the job "
                   "from it with a bitwise identical result")
def test_a_job_of_a_drained_node_continues_at_its_snapshot(tmp_path: Path, cluster: Cluster,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = replace(config().schedule, minibatch_size=10)
    run = Run(tmp_path, config(schedule=schedule, failure=ALWAYS, cluster=FAR))
    write = SnapshotServer.write

    def drain(server: SnapshotServer, *arguments: Any) -> bool:
        is_stored = write(server, *arguments)
        # the node of the first worker, in the middle of its job
        cluster.draining = {"n0"}
        return is_stored
    monkeypatch.setattr(SnapshotServer, "write", drain)
    spec = SlowSpec(run.config, str(run.egs), step_s=0.05)
    require_undisturbed(run, RayPool(spec, 1, run.store.layout.size), config(schedule=schedule))
    found = [incident.what for incident in run.recorder.incidents]
    assert "job_failed" in found and "job_continued" in found and "worker_died" not in found
    assert any(job.continued_at for record in run.recorder.records for job in record.jobs)
    workers = [actor for actor in cluster.actors if isinstance(actor.made, RayWorker)]
    assert len(workers) == 3 and workers[0].is_dead, "only the worker of the node was replaced"


class DrainedBetweenJobs(RayPool):
    """The node of a worker is drained when its job has ended, and that of the other has not."""

    cluster: Cluster

    def wait(self, timeout_s: float) -> Outcome | None:
        if not self.cluster.draining and self._kept and self._slots[0].is_idle and not self._slots[1].is_idle:
            self.cluster.draining = {self.cluster.actors[0].node_id}
            deadline = time.monotonic() + HANGS_S
            while self._capacity and not self._capacity.draining and time.monotonic() < deadline:
                time.sleep(0.01)
        return super().wait(timeout_s)


def test_a_result_that_a_worker_of_a_drained_node_keeps_is_fetched_before_the_worker_ends(tmp_path: Path, cluster: Cluster) -> None:
    schedule = replace(config().schedule, minibatch_size=10)
    run = Run(tmp_path, config(schedule=schedule, cluster=replace(JOINED, exchange="collective")))
    pool = DrainedBetweenJobs(run.spec, 1, run.store.layout.size)
    pool.cluster = cluster
    require_undisturbed(run, pool, config(schedule=schedule))
    assert cluster.draining and cluster.actors[0].is_dead
    found = {one.what for one in run.recorder.incidents}
    # workers that are threads have one name, also one and its replacement, which confuses groups
    assert "worker_replaced" in found and found <= {"worker_replaced", "exchange_failed"}


@pytest.mark.entry("El5", "Ray's object store has no memory for a result, and `ray.get` has a timeout", "works",
                   "the worker is neither dead nor hung, and its result is fetched when there is memory; after 300 s ClusterError "
                   "names the store")
def test_a_result_that_does_not_fit_into_memory_now_is_no_death(tmp_path: Path, cluster: Cluster,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, config(cluster=FAR))
    get, refused = ray.get, list[object]()

    def get_from_full_store(ref: Any, timeout: float | None = None) -> Any:
        if len(refused) < 8 and ref.done() and isinstance(ref.result(), JobResult):
            refused.append(ref)
            raise GetTimeoutError
        return get(ref, timeout=timeout)
    monkeypatch.setattr(ray, "get", get_from_full_store)
    require_undisturbed(run, RayPool(run.spec, 1, run.store.layout.size), config())
    assert len(refused) == 8 and run.recorder.incidents == []


@dataclass
class Late:
    """A second worker that is ready when `may_come` is set; the pool's lines are kept."""

    may_come: threading.Event = field(default_factory=threading.Event)
    lines: list[str] = field(default_factory=list)


@pytest.fixture
def late(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Late:
    found, prepare = Late(), RayWorker.prepare

    def prepare_late(worker: RayWorker, spec: Any, index: int, *arguments: Any, **options: Any) -> Any:
        assert index == 0 or found.may_come.wait(HANGS_S)
        return prepare(worker, spec, index, *arguments, **options)
    assert cluster
    monkeypatch.setattr(RayWorker, "prepare", prepare_late)
    return found


class EarlyPool(RayPool):
    """Lets the second worker come in the second outer iteration, and waits for it there."""

    late: Late

    def submit(self, job: Job) -> None:
        super().submit(job)
        if job.outer_iter:
            self.late.may_come.set()
            while not (self._slots[1].ready or self._slots[1].retired):
                self._poll(0.01)


class LaterPool(EarlyPool):
    """Is longer there than workers have time to start."""

    _is_starting = False


def early_pool(run: Run, late: Late, kind: type[EarlyPool] = EarlyPool) -> EarlyPool:
    pool = kind(run.spec, 1, run.store.layout.size, report=late.lines.append)
    pool.late = late
    return pool


@pytest.mark.entry("El6", "on the Ray cluster of `cluster.address` the machines of some workers start later than others", "works",
                   "training begins with the first worker that is ready, and the others join; the result is bitwise identical")
def test_training_begins_with_the_first_worker(tmp_path: Path, late: Late) -> None:
    run = Run(tmp_path, config(cluster=JOINED))
    require_undisturbed(run, early_pool(run, late), config())
    assert sum(line.startswith("training ") for line in late.lines) == sum(line.startswith("all 2 ") for line in late.lines) == 1
    used = [{job.worker for job in record.jobs} for record in run.recorder.records]
    assert used[0] == {0} and {0, 1} in used and run.recorder.incidents == []


@pytest.mark.parametrize("kind", [EarlyPool, LaterPool])
def test_a_late_worker_of_another_version_ends_the_run_only_at_its_start(
        tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch, kind: type[EarlyPool]) -> None:
    prepare = RayWorker.prepare

    def differing(worker: RayWorker, spec: Any, index: int, *arguments: Any, **options: Any) -> Any:
        address: Any = prepare(worker, spec, index, *arguments, **options)
        return replace(address, fingerprint=replace(address.fingerprint, torch="0.1")) if index else address
    monkeypatch.setattr(RayWorker, "prepare", differing)
    monkeypatch.setattr("ngsgd.cluster.restarts.MAX_RESTARTS_PER_HOUR", 1)
    run = Run(tmp_path, config(cluster=JOINED))
    pool = early_pool(run, late, kind)
    if kind is LaterPool:
        require_undisturbed(run, pool, config())
        assert [one.what for one in run.recorder.incidents][:1] == ["worker_refused"]
    else:
        with pytest.raises(WorkerFingerprintError, match="torch"):
            run.train(pool)


@pytest.mark.usefixtures("cluster")
def test_snapshots_beyond_the_memory_of_the_coordinator_are_not_kept() -> None:
    def server(num_bytes: float) -> Actor:
        return Actor(SnapshotServer(num_bytes), "head")
    store = SharedSnapshotStore()
    there, spec = store.allocate(), jobs.dataset_spec(config().optimizer)
    worker = Worker(spec, 0)
    for num_bytes, is_kept in ((1e3, False), (1e9, True)):
        memory = RemoteSnapshotMemory(there, server(num_bytes), is_empty=True)
        worker.snapshots.memory, worker.snapshots.timer.max_cost = memory, float("inf")
        result = worker.run(jobs.job_of(worker))
        deadline = time.monotonic() + HANGS_S
        while bool(store.newest(there)) != is_kept and time.monotonic() < deadline:
            pass
        assert bool(store.newest(there)) == is_kept and not result.remainder
    assert len(RemoteSnapshotMemory(there, server(1e9), is_empty=False).block(0))
    store.close()
