"""A task whose training is a cheap deterministic function of model and work items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from ngsgd.schedules import Shard
from ngsgd.training.job import Job, WorkItem
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.records import SubsetScore
from ngsgd.training.storage.ledger import piece_fields
from ngsgd.training.task import Batch, BatchLoss, Evaluation, ShardGrid, Task
from ngsgd.training.worker import initial_parameters

EXAMPLES = 4       # per minibatch
_SIZE = 12         # parameters
_NUM_TARGETS = 509
_LEARNING = 0.2    # of the distance to the target, per minibatch


class TinyModel(nn.Module):
    """Twelve parameters in two layers, so that streaming has two fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)


class SimulatedTask(Task):
    """Shards with a given number of minibatches; the optimum is known."""

    starts_anywhere = True

    def __init__(self, num_archives: int, shards_per_archive: int, num_minibatches: int) -> None:
        self.grid = ShardGrid(num_archives, shards_per_archive)
        self.num_minibatches = num_minibatches

    def model(self) -> nn.Module:
        return TinyModel()

    def shards(self) -> ShardGrid:
        return self.grid

    def num_batches(self, shard: Shard, size: int) -> int:
        # shards of unequal size, so that a swapped weight is seen
        return self.num_minibatches + shard.archive % 2

    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        yield Batch(torch.zeros(EXAMPLES, 2), EXAMPLES)

    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        assert isinstance(model, TinyModel)
        return BatchLoss(model.second(model.first(data)).square().sum(), len(data))

    def evaluate(self, model: nn.Module) -> Evaluation:
        parameters = np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])
        score = SubsetScore(objective(parameters), 0.0)
        return Evaluation(score, score)


def objective(parameters: Vector) -> float:
    """Minus the mean squared distance from the optimum."""
    difference = parameters - _targets()[0]
    return -float(np.dot(difference, difference)) / _SIZE


@cache
def _targets() -> Vector:
    random = np.random.default_rng(7)
    targets = (0.5 + 0.05 * random.standard_normal((_NUM_TARGETS, _SIZE))).astype(np.float32)
    targets[0] = 0.5
    return targets


def train_job(job: Job, layout: FlatLayout, seed: int, num_minibatches: int, task: SimulatedTask
              ) -> tuple[Vector, tuple[WorkItem, ...], dict[str, Any] | None]:
    """Run the first minibatches of a job; return (end or delta, work left, Fisher estimates).

    The result depends on every field of the job that may change a real result, except the attempt
    and the worker.
    """
    start = initial_parameters(job.start, layout)
    x, value = trained(start, job.start.fisher, job.lr, job.progress, list(map(piece_fields, job.pieces)), num_minibatches, seed,
                       task)
    remainder = []
    for piece in job.pieces:
        stop = task.num_batches(piece.shard, 1) if piece.stop is None else piece.stop
        done = min(num_minibatches, stop - piece.first)
        num_minibatches -= done
        if piece.first + done < stop:
            remainder.append(WorkItem(piece.shard, piece.outer_iter, piece.job, piece.first + done, stop))
    end = x - start if job.returns == "move" or job.start.codec else x
    return end, tuple(remainder), value if job.keep_fisher else None


def trained(start: Vector, fisher: Any, lr: float, progress: float, pieces: Sequence[Sequence[int | None]],
            num_minibatches: int, seed: int, task: SimulatedTask) -> tuple[Vector, dict[str, Any]]:
    """Return the parameters after some minibatches of work items, and the Fisher estimates."""
    x = start.copy()
    estimate = np.float32(0.0)
    if fisher is not None:
        estimate = np.float32(fisher["first"]["W"][0])
        x += np.float32(1e-3) * estimate
    rate = np.float32(_LEARNING * min(1.0, 50.0 * lr) * (1.0 + 0.01 * progress))
    targets = _targets()
    for archive, frame, outer_iter, job, first, stop in pieces:
        assert archive is not None and frame is not None and outer_iter is not None and job is not None and first is not None
        for minibatch in range(first, task.num_batches(Shard(archive, frame), 1) if stop is None else stop):
            if num_minibatches == 0:
                break
            num_minibatches -= 1
            key = (((archive * 31 + frame) * 31 + outer_iter) * 31 + job) * 31 + minibatch + seed
            x += rate * (targets[1 + key % (_NUM_TARGETS - 1)] - x)
    return x, {"first": {"W": np.array([estimate * np.float32(0.5) + x[0]], np.float32), "t": 1}}


def work_size(job: Job, task: SimulatedTask) -> int:
    """Number of minibatches of a job."""
    return sum((task.num_batches(piece.shard, 1) if piece.stop is None else piece.stop) - piece.first
               for piece in job.pieces)
