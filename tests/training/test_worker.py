"""What one job does beyond plain steps: backstitch, dropout, shrinking, and what it says of its Fisher estimates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.config import ModelConfig, OptimizerConfig, RunConfig, check
from ngsgd.egs.archives import prepare_archives
from ngsgd.schedules import Shard
from ngsgd.training.job import Held, Job, JobResult, Piece, Start, WorkerSpec
from ngsgd.training.worker import Worker
from tests import toy


def run(folder: Path, config: RunConfig, **job: Any) -> JobResult:
    egs = prepare_archives(toy.frame_set(1200, seed=1), toy.frame_set(300, seed=2), config.egs, num_classes=toy.NUM_CLASSES,
                           digest="toy", cache_root=folder)
    worker = Worker(WorkerSpec(config, str(egs)), 0)
    start = worker.layout.flatten(worker.model.state_dict())
    settings = {"outer_iter": 0, "job": 0, "attempt": 1, "pieces": (Piece(Shard(0, 0), 0, job.get("job", 0)),),
                "start": Start(Held(start)), "lr": 0.01, "lr_factor": 1.0, **job}
    return worker.run(Job(**settings))


def optimizer(**changes: Any) -> RunConfig:
    return toy.config(optimizer=OptimizerConfig(rank_in=4, rank_out=4, **changes))


def test_backstitch_trains_on_every_minibatch_once_and_elsewhere_than_plain_steps(tmp_path: Path) -> None:
    plain = run(tmp_path, optimizer())
    stitched = run(tmp_path, optimizer(backstitch_scale=0.5))
    assert stitched.num_minibatches == plain.num_minibatches
    assert stitched.num_frames == plain.num_frames
    assert not np.array_equal(stitched.sent.read(), plain.sent.read())


def test_backstitch_at_intervals_is_between_the_two(tmp_path: Path) -> None:
    every, second = (run(tmp_path, optimizer(backstitch_scale=0.5, backstitch_interval=n)) for n in (1, 2))
    assert not np.array_equal(every.sent.read(), second.sent.read())


def test_shrinking_changes_where_a_job_starts(tmp_path: Path) -> None:
    plain, shrunk = (run(tmp_path, optimizer(proportional_shrink=p)) for p in (0.0, 10.0))
    assert np.linalg.norm(shrunk.sent.read()) < np.linalg.norm(plain.sent.read())


def test_dropout_follows_the_schedule_and_repeats_with_the_job(tmp_path: Path) -> None:
    config = toy.config(model=ModelConfig(num_layers=2, hidden_dim=16, dropout_schedule="0,0.5,0"))
    off, on, again, other = (run(tmp_path, config, progress=progress, job=job)
                             for progress, job in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1)))
    assert off.objf > on.objf  # half of the activations are gone
    assert np.array_equal(on.sent.read(), again.sent.read())
    assert not np.array_equal(on.sent.read(), other.sent.read())


def test_the_result_tells_the_health_of_every_estimate(tmp_path: Path) -> None:
    health = run(tmp_path, optimizer(cosine_period=2)).health
    assert {name.split("/")[0] for name in health} == {"affine1", "affine2", "output"}
    assert 0.0 < health["affine1/input_last_e"] < 1.0
    assert 1.0 <= health["affine2/output_effective_rank"] <= 16.0
    assert 0.0 < health["output/cosine"] <= 1.0
    assert run(tmp_path, replace(toy.config(), optimizer=OptimizerConfig(kind="sgd"))).health == {}


@pytest.mark.parametrize(("changes", "named"), [
    ({"optimizer": OptimizerConfig(backstitch_scale=0.3, momentum=0.9)}, "backstitch_scale"),
    ({"optimizer": OptimizerConfig(proportional_shrink=100.0)}, "proportional_shrink"),
    ({"model": ModelConfig(dropout_schedule="0,much,0")}, "dropout_schedule"),
])
def test_rules_that_cannot_work_are_refused_before_anything_runs(changes: dict[str, Any], named: str) -> None:
    (problem,) = check(toy.config(**changes))
    assert named in problem
