"""The engine trains a task that has nothing to do with speech: regression on random tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, OptimizerConfig, OuterConfig, ScheduleConfig
from ngsgd.schedules import Schedule, Shard
from ngsgd.training.coordinator import Coordinator, RunControl, RunStorage
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import SubsetScore
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, first_checkpoint
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.task import Batch, BatchLoss, Evaluation, ShardGrid, Task, data_to_device
from ngsgd.training.worker import Worker
from ngsgd.training.worker_pool import WorkerPool
from tests.toy import Recorder

NUM_SHARDS, SHARD_SIZE, DIM = 4, 100, 6
SETTINGS = EngineSettings(
    schedule=ScheduleConfig(num_epochs=3.0, minibatch_size=16, lr_initial=0.01, lr_final=0.002, num_jobs_initial=2,
                            num_jobs_final=2),
    optimizer=OptimizerConfig(rank_in=3, rank_out=2), outer=OuterConfig("average"),
    cluster=ClusterConfig(num_workers=2, threads_per_worker=1), seed=5)


class Regression(Task):
    """Half the squared error of a small network on linear targets."""

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))

    def shards(self) -> ShardGrid:
        return ShardGrid(NUM_SHARDS)

    def num_batches(self, shard: Shard, size: int) -> int:
        return -(-SHARD_SIZE // size)

    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        x_ND, y_NK = _examples(shard.archive)
        order_N = torch.from_numpy(np.random.default_rng(seed).permutation(SHARD_SIZE))
        for rows in order_N.split(size)[first:stop]:
            yield Batch({"x": x_ND[rows], "y": y_NK[rows]}, len(rows))

    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        total = 0.5 * (model(data["x"]) - data["y"]).square().sum()
        return BatchLoss(total, len(data["x"]))

    def evaluate(self, model: nn.Module) -> Evaluation:
        def score(archive: int) -> SubsetScore:
            x_ND, y_NK = _examples(archive)
            return SubsetScore(-float(0.5 * (model(x_ND) - y_NK).square().sum()) / len(x_ND), 0.0)
        return Evaluation(train=score(0), valid=score(NUM_SHARDS))


@dataclass(frozen=True)
class RegressionSpec:
    settings: EngineSettings = SETTINGS

    def task(self, device: torch.device) -> Regression:
        return Regression()


def _examples(archive: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a shard; the shard after the last is held out."""
    generator = torch.Generator().manual_seed(archive)
    x_ND = torch.randn(SHARD_SIZE, DIM, generator=generator)
    weight_DK = torch.linspace(-1.0, 1.0, 2 * DIM).reshape(DIM, 2)
    return x_ND, x_ND @ weight_DK + 0.1 * torch.randn(SHARD_SIZE, 2, generator=generator)


# of the average over sites, which needs another package
MakeSites = Callable[[FlatLayout, Schedule, RunControl], Any]


def train(folder: Path, task: Task, pool: WorkerPool, settings: EngineSettings = SETTINGS,
          control: RunControl | None = None,
          make_sites: MakeSites = lambda *_: None) -> tuple[Checkpoint, Recorder]:
    """Train, or continue, the run of a folder."""
    model, recorder, control = task.model(), Recorder(), control or RunControl()
    layout = FlatLayout.of(model)
    schedule = task.shards().schedule(settings.schedule)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(folder / "checkpoints", layout, num_to_keep=2)
    start = store.latest()[0] or first_checkpoint(layout.flatten(model.state_dict()))
    ledger = Ledger(folder / "ledger.jsonl")
    try:
        pool.start()
        coordinator = Coordinator(task, model, schedule, pool, RunStorage(store, ledger, recorder),
                                  settings, control, make_sites(layout, schedule, control))
        return coordinator.train(start), recorder
    finally:
        ledger.close()
        pool.close()


@pytest.mark.slow
def test_a_regression_task_is_learned_in_one_process_and_in_two_with_the_same_model(tmp_path: Path) -> None:
    size = FlatLayout.of(Regression().model()).size
    one, here = train(tmp_path / "one", Regression(), InProcessPool(RegressionSpec(), 2, 1))
    two, there = train(tmp_path / "two", Regression(), ProcessPool(RegressionSpec(), 2, 1, size))
    assert np.array_equal(one.parameters, two.parameters)
    assert one.progress.frames_processed == 3 * NUM_SHARDS * SHARD_SIZE
    assert [record.valid for record in here.records] == [record.valid for record in there.records]
    assert here.records[-1].valid.objf > 0.5 * here.records[0].valid.objf
    assert audit(tmp_path / "two" / "ledger.jsonl") == []


@pytest.mark.slow
def test_the_random_numbers_of_a_job_depend_on_the_seed_of_the_run(tmp_path: Path) -> None:
    """Dropout and the order of examples."""
    same, again, other = (
        train(tmp_path / str(number), Regression(), InProcessPool(RegressionSpec(settings), 2, 1),
              settings)[0]
        for number, settings in enumerate((SETTINGS, SETTINGS, replace(SETTINGS, seed=6))))
    assert np.array_equal(same.parameters, again.parameters)
    assert not np.array_equal(same.parameters, other.parameters)


def test_a_spec_is_small_and_makes_a_worker_after_a_round_trip() -> None:
    content = pickle.dumps(RegressionSpec())
    assert len(content) < 10_000
    assert Worker(pickle.loads(content), 0).layout.size == FlatLayout.of(Regression().model()).size


class _Pair(NamedTuple):
    x: Tensor
    lengths: tuple[int, ...]


def test_tensors_inside_the_data_of_a_batch_are_moved_and_other_values_are_kept() -> None:
    moved = data_to_device({"pair": _Pair(torch.ones(2), (3, 4)), "list": [torch.ones(1), "text"]}, torch.device("meta"))
    assert moved["pair"].x.device.type == "meta" == moved["list"][0].device.type
    assert moved["pair"].lengths == (3, 4)
    assert moved["list"][1] == "text"


def test_a_task_must_implement_the_six_methods() -> None:
    assert Task.__abstractmethods__ == {"model", "shards", "num_batches", "batches", "loss", "evaluate"}
    with pytest.raises(TypeError):
        Task()  # type: ignore[abstract]
