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

    starts_anywhere = names_examples = can_continue_jobs = True

    def __init__(self, num_archives: int, shards_per_archive: int, num_minibatches: int, seed: int = 0) -> None:
        self.grid = ShardGrid(num_archives, shards_per_archive)
        self.num_minibatches, self.seed = num_minibatches, seed
        # (outer iteration, job) that a production worker runs -> seeds of its random numbers
        self.current = (-1, -1)
        self.seeds: dict[tuple[int, int], set[int]] = {}

    def model(self) -> nn.Module:
        return TinyModel()

    def shards(self) -> ShardGrid:
        return self.grid

    def num_batches(self, shard: Shard, size: int) -> int:
        # shards of unequal size, so that a swapped weight is seen
        return self.num_minibatches + shard.archive % 2

    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        for number in range(first, self.num_batches(shard, size) if stop is None else stop):
            target = _targets()[_place(shard.archive, shard.frame, *seed[1:], number, self.seed)]
            yield Batch(torch.from_numpy(target), EXAMPLES)

    def prepare_job(self, model: nn.Module, *, progress: float, seed: int) -> None:
        self.seeds.setdefault(self.current, set()).add(seed)

    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        x = torch.cat([parameter.reshape(-1) for parameter in model.parameters()])
        return BatchLoss(0.5 * (x - data).square().sum(), EXAMPLES)

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


def train_job(job: Job, layout: FlatLayout, num_minibatches: int, task: SimulatedTask
              ) -> tuple[Vector, Vector, tuple[WorkItem, ...], dict[str, Any] | None]:
    """Run the first minibatches of a job; return (start, end, work left, Fisher estimates).

    The result depends on every field of the job that may change a real result, except the attempt
    and the worker.
    """
    start = initial_parameters(job.start, layout)
    x, value = trained(start, job.start.fisher, rate_of(job.lr, job.progress), list(map(piece_fields, job.pieces)),
                       num_minibatches, task)
    remainder = []
    for piece in job.pieces:
        stop = task.num_batches(piece.shard, 1) if piece.stop is None else piece.stop
        done = min(num_minibatches, stop - piece.first)
        num_minibatches -= done
        if piece.first + done < stop:
            remainder.append(WorkItem(piece.shard, piece.outer_iter, piece.job, piece.first + done, stop))
    return start, x, tuple(remainder), value if job.keep_fisher else None


def rate_of(lr: float, progress: float) -> float:
    """Fraction of the distance to the target of a minibatch, in simulated training."""
    return _LEARNING * min(1.0, 50.0 * lr) * (1.0 + 0.01 * progress)


def trained(start: Vector, fisher: Any, rate: float, pieces: Sequence[Sequence[int | None]], num_minibatches: int,
            task: SimulatedTask) -> tuple[Vector, dict[str, Any]]:
    """Return the parameters after some minibatches of work items, and the Fisher estimates.

    SGD on the loss of the task has the rate of its learning rate.
    """
    x = start.copy()
    estimate = np.float32(0.0)
    if fisher is not None:
        estimate = np.float32(fisher["first"]["W"][0])
        x += np.float32(1e-3) * estimate
    targets = _targets()
    for archive, frame, outer_iter, job, first, stop in pieces:
        assert archive is not None and frame is not None and outer_iter is not None and job is not None and first is not None
        for minibatch in range(first, task.num_batches(Shard(archive, frame), 1) if stop is None else stop):
            if num_minibatches == 0:
                break
            num_minibatches -= 1
            x += np.float32(rate) * (targets[_place(archive, frame, outer_iter, job, minibatch, task.seed)] - x)
    return x, {"first": {"W": np.array([estimate * np.float32(0.5) + x[0]], np.float32), "t": 1}}


def _place(archive: int, frame: int, outer_iter: int, job: int, minibatch: int, seed: int) -> int:
    """Index of the target of a minibatch."""
    return 1 + ((((archive * 31 + frame) * 31 + outer_iter) * 31 + job) * 31 + minibatch + seed) % (_NUM_TARGETS - 1)


def work_size(job: Job, task: SimulatedTask) -> int:
    """Number of minibatches of a job."""
    return sum((task.num_batches(piece.shard, 1) if piece.stop is None else piece.stop) - piece.first
               for piece in job.pieces)
