"""The Task: everything that the engine knows about the model, the data and the objective.

The six abstract methods suffice for a fixed model.  The other methods have defaults; a task overrides
them to prepare jobs (dropout schedules), to grow its model, or to make the held-out check cheaper.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ngsgd.config import ScheduleConfig
from ngsgd.errors import ConfigError
from ngsgd.schedules import Schedule, Shard
from ngsgd.training.records import SubsetScore
from ngsgd.training.settings import EngineSettings


@dataclass(frozen=True)
class ShardGrid:
    """The units of data that jobs are given: `Shard(archive, frame)` for all of both ranges."""

    num_archives: int
    # Kaldi: frames per example, one of which a pass reads
    shards_per_archive: int = 1

    def schedule(self, s: ScheduleConfig) -> Schedule:
        """The outer iterations of a run over these units."""
        return Schedule(self.num_archives, self.shards_per_archive, s.num_epochs, s.lr_initial, s.lr_final,
                        s.num_jobs_initial, s.num_jobs_final, s.num_jobs_step, s.lr_factors)


class Batch(NamedTuple):
    """One minibatch, in host memory."""

    # tensors, or tuples and dictionaries of them: moved to the worker's device
    data: Any
    # counted as processed, and as rows for the natural gradient
    num_examples: int


class BatchLoss(NamedTuple):
    """The objective of one minibatch and the sums that the engine reports."""

    # minus the objf, summed over the examples; differentiable
    total: Tensor
    # total weight of the examples, by which the sums are divided
    weight: Tensor | float
    # weighted, for the accuracy
    num_correct: Tensor | float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """A model on fixed subsets of the data."""

    train: SubsetScore
    valid: SubsetScore
    # further numbers, by name of a chart
    figures: dict[str, float] = field(default_factory=dict)


class Growth:
    """How a model changes its structure during a run; the model of this base class never does.

    A stage says which parts of the model are in use.  All parts exist from the start, so parameter
    vectors keep their size, and the stage is a function of the outer iteration alone.
    """

    def stage(self, outer_iter: int) -> Hashable:
        """The stage in which an outer iteration trains; -1 is the initial model."""
        return None

    def is_early(self, outer_iter: int) -> bool:
        """Whether averaging would hurt: minibatches are halved and only the best job is kept."""
        return False

    def network(self, model: nn.Module, stage: Hashable) -> nn.Module:
        """The network to train in a stage; its modules are those of the model."""
        return model

    def select(self, model: nn.Module, stage: Hashable) -> None:
        """Make `model.forward` that of a stage."""

    def new_parts(self, model: nn.Module, state: Mapping[str, Tensor], before: Hashable,
                  after: Hashable, seed: int) -> Mapping[str, Tensor]:
        """The entries of the state that change from one stage to the next; `state` is not modified."""
        return {}


class Task(ABC):
    """What is trained.  Every method is deterministic in its arguments and the task's settings."""

    growth: Growth = Growth()
    # objf of a model that knows only the number of classes; results below twice this value are
    # rejected
    chance_objf: float = -math.inf
    # whether `batches` begins at any minibatch without making those before it
    starts_anywhere: bool = False
    # False: a drop of the held-out objf is no divergence, because another objective is trained
    optimizes_held_out_objf: bool = True
    # whether only the optimizer changes parameters, so that update-norm clipping bounds a job's
    # delta
    has_bounded_updates: bool = False

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model with its initial parameters; torch's random numbers are seeded (`seeded_model`)."""

    @abstractmethod
    def shards(self) -> ShardGrid:
        """The units of data that jobs are given."""

    @abstractmethod
    def num_batches(self, shard: Shard, size: int) -> int:
        """The number of minibatches of about `size` examples in one pass over a shard."""

    @abstractmethod
    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        """Minibatches `first` to `stop` of a pass over a shard, in an order that `seed` decides.

        `first` and `stop` select from the same sequence, whatever they are.  `seed` is (seed of the
        run, outer iteration, job).
        """

    @abstractmethod
    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        """One forward pass over the data of a batch, on the model's device."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Score a model in evaluation mode on the CPU; called in a background thread, without gradients."""

    def prepare_evaluation(self, model: nn.Module) -> None:  # noqa: B027  optional
        """Load held-out data and check the model, so that errors appear before training starts."""

    def held_out_objf(self, model: nn.Module) -> float:
        """Objf on a small held-out subset; called once per outer iteration before the commit."""
        return self.evaluate(model).valid.objf

    def prepare_job(self, model: nn.Module, *, progress: float, seed: int) -> None:
        """Set up the model for a job; `progress` is the share of the data processed, 0 to 1."""
        torch.manual_seed(seed)


class TaskSpec(Protocol):
    """A small picklable description from which each worker process makes its task."""

    @property
    def settings(self) -> EngineSettings: ...

    def task(self, device: torch.device) -> Task:
        """The task of a worker that computes on `device`."""


def seeded_model(task: Task, seed: int) -> nn.Module:
    """A new model of the task; the random numbers of this process are as before.

    Raises:
        ConfigError: it cannot be averaged, or has nothing to train.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the task's model is a {type(model).__name__}; it must be a torch.nn.Module.")
    wrong = [f"{name} ({str(value.dtype).removeprefix('torch.')})" for name, value in model.state_dict().items()
             if (value.is_floating_point() or value.is_complex()) and value.dtype != torch.float32]
    if wrong:
        raise ConfigError(f"the model has {', '.join(wrong[:3])}; parameters and buffers must be float32, in which they are "
                          "averaged.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train.")
    return model


def to_device(data: Any, device: torch.device) -> Any:
    """The data of a batch with its tensors on a device; other values are unchanged."""
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """The data of a batch with `function` of each tensor in place of it; other values are unchanged."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(map_tensors(value, function) for value in data)
    if isinstance(data, Mapping):
        return {key: map_tensors(value, function) for key, value in data.items()}
    return data
