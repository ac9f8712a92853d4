"""A job that another worker continues is bitwise identical to a job without interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import OptimizerConfig
from ngsgd.config.sections.optimizer import EVERY_MINIBATCH
from ngsgd.preconditioners import METHODS
from ngsgd.training.job import JobInit, LocalRef
from ngsgd.training.worker import Worker
from tests import toy
from tests.training.snapshots.jobs import (
    Memory,
    contents,
    continued,
    dataset_spec,
    frame_spec,
    header,
    interrupted,
    job_of,
    noisy_stream_task,
    plain_task,
    sequence_spec,
    stream_task,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ngsgd": {}, "ngsgd momentum": {"momentum": 0.9}, "sgd": {"kind": "sgd"}, "sgd momentum": {"kind": "sgd", "momentum": 0.9},
    "backstitch": {"backstitch_scale": 0.3, "backstitch_interval": 2}, "limit per sample": {"max_change_per_sample": 0.075},
    "keep": {"curvature_state": "keep"}}


def rank(kind: str) -> dict[str, int]:
    return {"rank_in": 4, "rank_out": 4} if kind == "ngsgd" else {}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("places", [(1,), (10,), (3, 2)])
def test_every_optimizer_continues_with_batch_norm_dropout_and_random_examples(name: str, places: tuple[int, ...]) -> None:
    options = OPTIMIZERS[name]
    spec = dataset_spec(OptimizerConfig(**{**options, **rank(options.get("kind", "ngsgd"))}))
    worker = Worker(spec, 0)
    job = job_of(worker)
    result = continued(spec, job, *places)
    assert result.continued_at == sum(places)
    assert contents(result) == contents(worker.run(job))


@pytest.mark.parametrize("kind", METHODS)
def test_every_preconditioner_continues(kind: Any) -> None:
    spec = dataset_spec(OptimizerConfig(kind), plain_task)
    worker = Worker(spec, 0)
    job = job_of(worker)
    result = continued(spec, job, 4)
    assert result.continued_at == 4
    assert contents(result) == contents(worker.run(job))


@pytest.mark.parametrize("place", [1, 4, 6])
def test_speech_frames_continue(place: int, tmp_path: Path) -> None:
    spec = frame_spec(tmp_path, toy.config())
    worker = Worker(spec, 0)
    job = job_of(worker)
    result = continued(spec, job, place)
    assert result.continued_at == place
    assert contents(result) == contents(worker.run(job))


def test_streams_continue() -> None:
    spec = dataset_spec(OptimizerConfig(rank_in=4, rank_out=4), stream_task)
    worker = Worker(spec, 0)
    job = job_of(worker)
    result = continued(spec, job, 3)
    assert result.continued_at == 3
    assert contents(result) == contents(worker.run(job))


def test_streams_with_global_random_numbers_start_at_the_beginning() -> None:
    spec = dataset_spec(OptimizerConfig(rank_in=4, rank_out=4), noisy_stream_task)
    worker = Worker(spec, 0)
    job = job_of(worker)
    result = continued(spec, job, 3)
    assert result.continued_at == 0
    assert contents(result) == contents(worker.run(job))


@pytest.mark.parametrize("kind", METHODS)
def test_preconditioners_that_are_updated_after_the_snapshot_continue(kind: Any) -> None:
    intervals: dict[str, Any] = {} if kind in EVERY_MINIBATCH else {"curvature_interval": 3, "inverse_interval": 3}
    spec = dataset_spec(OptimizerConfig(kind, **intervals), plain_task)
    worker = Worker(spec, 0)
    job = job_of(worker)
    result = continued(spec, job, 5, 2)
    assert result.continued_at == 7
    assert contents(result) == contents(worker.run(job))


@pytest.mark.parametrize("objective", ["smbr", "mmi", "lfmmi"])
def test_sequence_objectives_continue(objective: Any, tmp_path: Path) -> None:
    spec = sequence_spec(tmp_path, objective)
    worker = Worker(spec, 0)
    job = job_of(worker)
    result = continued(spec, job, 2)
    assert result.continued_at == 2
    assert contents(result) == contents(worker.run(job))


def test_a_snapshot_of_another_job_is_not_used(tmp_path: Path) -> None:
    spec = dataset_spec(OptimizerConfig("sgd"))
    worker, memory = Worker(spec, 0), Memory()
    job = job_of(worker)
    interrupted(spec, job, 4, memory)
    for other in (replace(job, lr=0.02), replace(job, outer_iter=1), replace(job, job=1), replace(job, excluded=("7",)),
                  replace(job, pieces=job.pieces[:1]), replace(job, start=JobInit(LocalRef(job.start.model.read() + 1)))):
        assert continued(spec, other, memory=memory).continued_at == 0


def test_a_damaged_snapshot_is_not_used() -> None:
    spec = dataset_spec(OptimizerConfig("sgd"))
    worker, memory = Worker(spec, 0), Memory()
    job = job_of(worker)
    interrupted(spec, job, 4, memory)
    newest = max(range(2), key=lambda index: header(memory.block(index)).num_minibatches)
    memory.block(newest)[-200] ^= 1
    result = continued(spec, job, memory=memory)
    assert result.continued_at == 3
    assert contents(result) == contents(worker.run(job))
