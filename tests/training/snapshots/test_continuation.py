"""A job that another worker continues has the result of a job without interruption, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import OptimizerConfig
from ngsgd.preconditioners import METHODS
from ngsgd.training.worker import Worker
from tests import toy
from tests.training.snapshots.jobs import contents, continued, dataset_spec, frame_spec, job_of, plain_task, stream_task

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
    assert contents(continued(spec, job, 3)) == contents(worker.run(job))
