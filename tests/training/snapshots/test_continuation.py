"""A job that another worker continues is bitwise identical to a job without interruption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import OptimizerConfig
from ngsgd.config.sections.optimizer import EVERY_MINIBATCH
from ngsgd.preconditioners import METHODS
from ngsgd.training.job import JobInit, LocalRef
from ngsgd.training.task import Task, TaskSpec
from ngsgd.training.worker import Worker
from tests import toy
from tests.simulation.production import SimulatedMemory
from tests.training.snapshots import jobs

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ngsgd": {}, "ngsgd momentum": {"momentum": 0.9}, "sgd": {"kind": "sgd"}, "sgd momentum": {"kind": "sgd", "momentum": 0.9},
    "backstitch": {"backstitch_scale": 0.3},
    "keep": {"curvature_state": "keep"}}


def rank(kind: str) -> dict[str, int]:
    return {"rank_in": 4, "rank_out": 4} if kind == "ngsgd" else {}


def require_continues(spec: TaskSpec, *places: int, at: int | None = None) -> None:
    """A job that ends after these minibatches continues at the last one, or `at` another one."""
    worker = Worker(spec, 0)
    job = jobs.job_of(worker)
    result = jobs.continued(spec, job, *places)
    assert result.continued_at == (sum(places) if at is None else at)
    assert jobs.contents(result) == jobs.contents(worker.run(job))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("places", [(1,), (10,), (3, 2)])
def test_every_optimizer_continues_with_batch_norm_dropout_and_random_examples(
        name: str, places: tuple[int, ...]) -> None:
    options = OPTIMIZERS[name]
    config = OptimizerConfig(**{**options, **rank(options.get("kind", "ngsgd"))})
    require_continues(jobs.dataset_spec(config), *places)


# with intervals the curvature is updated after the snapshot
@pytest.mark.parametrize(("interval", "places"), [(1, (4,)), (3, (5, 2))])
@pytest.mark.parametrize("kind", METHODS)
def test_every_preconditioner_continues(kind: Any, interval: int, places: tuple[int, ...]) -> None:
    intervals: dict[str, Any] = {"curvature_interval": interval, "inverse_interval": interval}
    has_none = interval == 1 or kind in EVERY_MINIBATCH
    config = OptimizerConfig(kind, **({} if has_none else intervals))
    require_continues(jobs.dataset_spec(config, jobs.chain_task if kind == "kfra" else jobs.plain_task), *places)


@pytest.mark.parametrize("place", [1, 4, 6])
def test_speech_frames_continue(place: int, tmp_path: Path) -> None:
    require_continues(jobs.frame_spec(tmp_path, toy.config()), place)


@pytest.mark.parametrize(("task", "at"), [(jobs.stream_task, 3), (jobs.noisy_stream_task, 0)])
def test_streams_continue_unless_they_use_global_random_numbers(
        task: Callable[[], Task], at: int) -> None:
    require_continues(jobs.dataset_spec(OptimizerConfig(rank_in=4, rank_out=4), task), 3, at=at)


@pytest.mark.parametrize("objective", ["smbr", "mmi", "lfmmi"])
def test_sequence_objectives_continue(objective: Any, tmp_path: Path) -> None:
    require_continues(jobs.sequence_spec(tmp_path, objective), 2)


def test_a_snapshot_of_another_job_is_not_used(tmp_path: Path) -> None:
    spec = jobs.dataset_spec(OptimizerConfig("sgd"))
    worker, memory = Worker(spec, 0), SimulatedMemory()
    job = jobs.job_of(worker)
    jobs.interrupted(spec, job, 4, memory)
    for other in (replace(job, lr=0.02), replace(job, outer_iter=1), replace(job, job=1), replace(job, excluded=("7",)),
                  replace(job, pieces=job.pieces[:1]), replace(job, start=JobInit(LocalRef(job.start.model.read() + 1)))):
        assert jobs.continued(spec, other, memory=memory).continued_at == 0


def test_a_damaged_snapshot_is_not_used() -> None:
    spec = jobs.dataset_spec(OptimizerConfig("sgd"))
    worker, memory = Worker(spec, 0), SimulatedMemory()
    job = jobs.job_of(worker)
    jobs.interrupted(spec, job, 4, memory)
    newest = max(range(2), key=lambda index: jobs.header(memory.block(index)).num_minibatches)
    memory.block(newest)[-200] ^= 1
    result = jobs.continued(spec, job, memory=memory)
    assert result.continued_at == 3
    assert jobs.contents(result) == jobs.contents(worker.run(job))
