"""Comparison of two results of a job, and the verdict on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd.schedules import Shard
from ngsgd.training.auditing import comparison
from ngsgd.training.auditing.audits import Audits
from ngsgd.training.auditing.cases import partners, work_done
from ngsgd.training.auditing.comparison import Run, verdict
from ngsgd.training.auditing.pool import WorkerIdentity
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, WorkItem
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker_pool import VectorRefcount

LAYOUT = FlatLayout.of(nn.Linear(30, 10))
CPU = WorkerIdentity("worker 0", bits="avx512")
OTHER_CPU = WorkerIdentity("worker 1", bits="avx2")
GPU = WorkerIdentity("worker 2", bits="h100", is_reproducible=False)
PIECE = WorkItem(Shard(0, 0), 0, 0)


def vector(seed: int, scale: float = 1.0) -> Vector:
    return (scale * torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))).numpy()


def run(changed: Vector, identity: WorkerIdentity = CPU, *, worker: int = 0, objf: float = -1.0) -> Run:
    start = vector(0)
    job = Job(0, 0, 1, (PIECE,), JobInit(LocalRef(start)), 0.1, 1.0)
    end = start + changed
    result = JobResult(job, worker, LocalRef(end), digest(end), 100, 10, objf, 0.0, 1.0, 0.0, 0.0, 0)
    return Run(worker, identity, result, comparison.digests_of(result))


def agree(one: Run, other: Run) -> bool:
    return comparison.agree(LAYOUT, one, other)


def test_workers_of_one_fingerprint_must_agree_bitwise() -> None:
    change, wrong = vector(1), vector(1)
    wrong[7] = np.nextafter(wrong[7], np.float32(np.inf)) * np.float32(1.00001)
    assert agree(run(change), run(change.copy()))
    assert not agree(run(change), run(wrong))
    # the objective is compared, too
    assert not agree(run(change), run(change, objf=-1.0000001))


@pytest.mark.parametrize("other", [OTHER_CPU, GPU])
def test_other_workers_agree_if_objective_and_norm_are_close(other: WorkerIdentity) -> None:
    # early in training, rounding turns the parameters elsewhere, while norm and objective stay
    assert agree(run(vector(1)), run(vector(1)[::-1].copy(), other, objf=-1.001))
    assert not agree(run(vector(1)), run(vector(1), other, objf=-1.1))
    assert not agree(run(vector(1)), run(vector(1, scale=1.1), other))
    damaged = vector(1)
    damaged[3] = 1e6
    assert not agree(run(vector(1)), run(damaged, other))
    assert not agree(run(vector(1)), run(np.full_like(damaged, np.nan), other))
    assert not agree(run(vector(1)), run(vector(1), other, objf=float("nan")))


def by_value(*values: int) -> tuple[list[Run], Callable[[Run, Run], bool]]:
    """Runs whose first parameter is a value; the workers are 0, 1, 2, 0, 1, 2."""
    runs = [run(np.full(LAYOUT.size, value, np.float32), worker=index % 3) for index, value in enumerate(values)]
    return runs, agree


@pytest.mark.parametrize(("values", "others", "outcome", "faulty"), [
    ((1,), True, "ask_other", ()), ((1,), False, "alone", ()), ((1, 1), True, "agreed", ()), ((1, 2), True, "ask_other", ()),
    ((1, 2), False, "ask_again", ()), ((1, 2, 2), True, "decided", (0,)), ((1, 2, 1), True, "decided", (1,)),
    ((1, 2, 3), True, "ask_again", ()), ((1, 2, 3, 1, 4, 5), True, "decided", (1, 2)),
    ((1, 2, 3, 1, 2, 4), True, "undecided", ()), ((1, 2, 3, 4, 5, 6), True, "not_reproducible", ())])
def test_verdicts(values: tuple[int, ...], others: bool, outcome: str, faulty: tuple[int, ...]) -> None:
    found = verdict(*by_value(*values), others=others)
    assert (found.outcome, found.faulty) == (outcome, faulty)


def test_every_worker_has_one_partner_on_another_machine() -> None:
    hosts = {worker: f"host-{worker // 2}" for worker in range(6)}
    found = partners(hosts)
    assert sorted(found) == sorted(found.values()) == list(range(6))
    assert all(hosts[worker] != hosts[other] for worker, other in found.items())
    assert partners({0: "a"}) == {} and partners({0: "a", 1: "a"}) == {0: 1, 1: 0}


def test_work_without_the_remainder() -> None:
    done, half, rest = WorkItem(Shard(0, 0), 0, 0, 0, 9), WorkItem(Shard(1, 0), 0, 1, 2, 8), WorkItem(Shard(2, 0), 0, 2)
    left = (WorkItem(Shard(1, 0), 0, 1, 5, 8), rest)
    assert work_done((done, half, rest), left) == (done, WorkItem(Shard(1, 0), 0, 1, 2, 5))


class TwoWorkers:
    """A pool whose second worker is never idle."""

    def idle_workers(self) -> list[int]:
        return []

    def workers_alive(self) -> list[int]:
        return [0, 1]

    def worker_of(self, job: Job) -> int:
        return 0

    def identity_of(self, worker: int) -> WorkerIdentity:
        return WorkerIdentity(f"worker {worker}")

    def submit_to(self, job: Job, worker: int) -> None:
        raise AssertionError("no worker is idle")

    def quarantine(self, worker: int) -> str:
        raise AssertionError("no worker is at fault")


def audits_of(every: int) -> Audits:
    pool: Any = TwoWorkers()
    ledger: Any = SimpleNamespace(audited=lambda *_arguments: None)
    return Audits(pool, ledger, LAYOUT, every, lambda incident: None, VectorRefcount(pool), lambda result: None, lambda: 0.0)


def test_after_a_retry_the_next_job_of_the_worker_is_audited() -> None:
    audits, result, plan = audits_of(3), run(vector(1)).result, object()
    for number in range(3):
        audits.submitted(plan, replace(result.job, job=number))
    # the third job fails, and runs again
    audits.submitted(plan, replace(result.job, job=2, attempt=2))
    following = replace(result.job, outer_iter=1)
    audits.submitted(object(), following)
    assert audits.hold(replace(result, job=following))


class ThreeWorkers(TwoWorkers):
    """A pool whose second and third worker are idle."""

    def __init__(self) -> None:
        self.submitted: dict[int, Job] = {}
        self.quarantined: list[int] = []

    def idle_workers(self) -> list[int]:
        return [worker for worker in (1, 2) if worker not in self.submitted]

    def workers_alive(self) -> list[int]:
        return [0, 1, 2]

    def submit_to(self, job: Job, worker: int) -> None:
        self.submitted[worker] = job

    def release(self, _ref: object) -> None:
        """Vectors of this test are on the heap."""

    def quarantine(self, worker: int) -> str:
        self.quarantined.append(worker)
        return ""


def test_a_stop_waits_for_the_verdict_on_runs_that_differ() -> None:
    pool: Any = ThreeWorkers()
    ledger: Any = SimpleNamespace(audited=lambda *_: None, repeated=lambda *_: None)
    audits = Audits(pool, ledger, LAYOUT, 1, lambda incident: None, VectorRefcount(pool), lambda result: None, lambda: 0.0)
    right, wrong = run(vector(1)).result, run(vector(2), worker=1).result
    audits.submitted(object(), right.job)
    assert audits.hold(right)
    audits.feed(0, 10.0, is_stopping=False)
    audits.settle(replace(wrong, job=pool.submitted[1]))
    audits.feed(0, 10.0, is_stopping=True)
    assert not audits.concluded()
    audits.settle(replace(right, job=pool.submitted[2], worker=2))
    assert [one.result.job.job for one in audits.concluded()] == [0] and pool.quarantined == [1]


def test_a_duplicate_is_recognized_until_its_concluded_audit_was_taken() -> None:
    audits = audits_of(1)
    result = run(vector(1)).result
    assert not audits.holds(result.job)
    audits.submitted(object(), result.job)
    assert audits.hold(result)
    assert audits.holds(result.job)
    # the run stops, so the audit ends without a repetition
    audits.feed(result.job.outer_iter, 10.0, is_stopping=True)
    assert audits.holds(result.job)
    assert [one.result for one in audits.concluded()] == [result]
    assert not audits.holds(result.job)
