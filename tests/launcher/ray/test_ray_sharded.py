"""Workers of a Ray cluster take the outer step by default; actors are threads of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from ngsgd.cluster.exchange import collective
from ngsgd.cluster.exchange.collective import FetchRequest, StepRequest
from ngsgd.config import ClusterConfig
from ngsgd.launcher.ray.pool import RayPool, WorkerSlot
from ngsgd.launcher.ray.worker import RayWorker
from ngsgd.training.job import Job
from tests.launcher.ray.in_threads import Cluster
from tests.toy import Run, config, require_undisturbed

FAR = ClusterConfig(num_workers=3, threads_per_worker=1)


class CountingPool(RayPool):
    """Counts the questions to workers, and the jobs of which they keep the result."""

    def __init__(self, run: Run) -> None:
        self.lines: list[str] = []
        super().__init__(run.spec, 1, run.store.layout.size, report=self.lines.append)
        self.asked: list[Mapping[int, StepRequest | FetchRequest]] = []
        self.kept: list[bool] = []

    def _ask(self, questions: Mapping[int, StepRequest | FetchRequest], *arguments: Any) -> dict[int, object]:
        self.asked.append(questions)
        return super()._ask(questions, *arguments)

    def _post(self, slot: WorkerSlot, job: Job, *arguments: Any, keep: bool) -> None:
        self.kept.append(keep)
        super()._post(slot, job, *arguments, keep=keep)

    def num_questions(self, kind: type) -> int:
        return sum(isinstance(question, kind) for questions in self.asked for question in questions.values())


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """Vectors in the object store of the head; the first worker is on the coordinator's machine."""
    found: list[np.ndarray[Any, Any]] = []
    cluster, prepare = Cluster(monkeypatch), RayWorker.prepare
    put = ray.put

    def counted(value: Any) -> Any:
        found.extend([value] * isinstance(value, np.ndarray))
        return put(value)

    def far(worker: RayWorker, spec: Any, index: int, *arguments: Any, **options: Any) -> Any:
        address: Any = prepare(worker, spec, index, *arguments, **options)
        actor = next(actor for actor in cluster.actors if actor.made is worker)
        return replace(address, node_id=actor.node_id, device=replace(address.device, is_near=index == 0))
    monkeypatch.setattr(ray, "put", counted)
    monkeypatch.setattr(RayWorker, "prepare", far)
    monkeypatch.setattr("ngsgd.launcher.ray.capacity.POLL_S", 0.01)
    return found


def run_of(tmp_path: Path, cluster: ClusterConfig, num_jobs: int = 3) -> Run:
    schedule = replace(config().schedule, num_jobs_initial=num_jobs, num_jobs_final=num_jobs)
    return Run(tmp_path, config(cluster=cluster, schedule=schedule))


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_workers_on_several_machines_average_and_the_head_stores_the_first_model_alone(
        tmp_path: Path, models: list[Any], compression: Any) -> None:
    run = run_of(tmp_path, replace(FAR, compression=compression))
    pool = CountingPool(run)
    require_undisturbed(run, pool)
    assert sum("collective" in line for line in pool.lines) == 1 and run.recorder.incidents == []
    assert all(pool.kept) and len(pool.kept) > 6
    assert pool.num_questions(StepRequest) == len(pool.kept) and not pool.num_questions(FetchRequest)
    # with a codec the next job of a slot also needs the last vector, which stays with Ray
    assert len(models) == 1, "a model that its workers gathered went through the head"


def test_without_a_group_the_coordinator_averages_and_one_incident_has_the_reason(
        tmp_path: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*_: Any, **__: Any) -> Any:
        raise RuntimeError("firewall")
    monkeypatch.setattr(collective, "join", join)
    run = run_of(tmp_path, FAR)
    pool = CountingPool(run)
    require_undisturbed(run, pool)
    (incident,) = run.recorder.incidents
    assert incident.what == "exchange_failed" and "firewall" in incident.message
    # results of outer iterations without a try arrive with their jobs
    assert True in pool.kept and False in pool.kept
    assert len(models) == len(run.recorder.records)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_of_one_machine_or_one_worker_make_no_group(tmp_path: Path, models: list[Any], num_workers: int,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = RayWorker.prepare

    def placed(*arguments: Any, **options: Any) -> Any:
        address: Any = prepare(*arguments, **options)
        return replace(address, device=replace(address.device, is_near=num_workers > 1))
    monkeypatch.setattr(RayWorker, "prepare", placed)
    run = run_of(tmp_path, replace(FAR, num_workers=num_workers))
    pool = CountingPool(run)
    require_undisturbed(run, pool)
    assert not any(pool.kept) and pool.asked == [] and run.recorder.incidents == []
    assert len(models) == (len(run.recorder.records) if num_workers == 1 else 0)


class GrowingPool(CountingPool):
    """Its worker of another machine joins in the second outer iteration."""

    def start(self) -> None:
        self.is_waiting = True
        super().start()

    def _new_slot(self, index: int, deaths: Sequence[str] = ()) -> WorkerSlot:
        slot = super()._new_slot(index, deaths)
        if index and self.is_waiting:
            slot.starting, self.late = None, slot.starting
        return slot

    def submit(self, job: Job) -> None:
        super().submit(job)
        if job.outer_iter and self.is_waiting:
            self.is_waiting, self._slots[1].starting = False, self.late
            while not self._slots[1].ready:
                self._poll(0.01)


def test_a_worker_of_another_machine_that_joins_later_makes_the_workers_average(tmp_path: Path, models: list[Any]) -> None:
    run = run_of(tmp_path, replace(FAR, num_workers=2, kind="ray", address="10.0.0.1:6379"), num_jobs=2)
    pool = GrowingPool(run)
    require_undisturbed(run, pool, config())
    assert not any(pool.kept[:2]) and all(pool.kept[4:]) and len(pool.kept) > 6
    # one outer iteration has results of both ways
    assert pool.num_questions(StepRequest) > 2 and pool.num_questions(FetchRequest) <= 1
    assert run.recorder.incidents == [] and len(models) <= 2
