"""The Task interface: model, data and objective as the training loop uses them.

The six abstract methods suffice for a fixed model. The other methods have defaults. A task
overrides them to prepare jobs (dropout schedules), to grow its model, or to check fewer data.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from ngsgd.config import ScheduleConfig
from ngsgd.errors import ConfigError, NgsgdError
from ngsgd.imports import first_line
from ngsgd.schedules import Schedule, Shard
from ngsgd.training.job import WorkItem
from ngsgd.training.records import SubsetScore
from ngsgd.training.settings import EngineSettings


@dataclass(frozen=True)
class ShardGrid:
    """Units of data that jobs are assigned: `Shard(archive, frame)` for all of both ranges."""

    num_archives: int
    # Kaldi: frames per example, one of which a pass reads
    shards_per_archive: int = 1

    def schedule(self, s: ScheduleConfig) -> Schedule:
        """Build the schedule of a run over these units."""
        return Schedule(self.num_archives, self.shards_per_archive, s.num_epochs, s.lr_initial, s.lr_final,
                        s.num_jobs_initial, s.num_jobs_final, 1, s.lr_factors, s.lr_schedule, s.warm_up)


class Batch(NamedTuple):
    """One minibatch, in host memory."""

    # tensors, or tuples, dictionaries and dataclasses of them: moved to the worker's device
    data: Any
    # number of examples: counted as processed, and as rows for the natural gradient
    num_examples: int


class BatchLoss(NamedTuple):
    """Objective of one minibatch and the sums that are reported."""

    # minus the objf, summed over the examples; differentiable
    total: Tensor
    # total weight of the examples; the sums are divided by it
    weight: Tensor | float
    # weighted number of correct examples, for the accuracy
    num_correct: Tensor | float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on fixed subsets of the data."""

    train: SubsetScore
    valid: SubsetScore
    # additional values, by name of a chart
    figures: dict[str, float] = field(default_factory=dict)


class Growth:
    """Structure changes of a model during a run; the model of this base class never changes.

    A stage selects the active parts of the model. All parts exist from the start, so parameter
    vectors keep their size. The stage is a function of the outer iteration alone.
    """

    def stage(self, outer_iter: int) -> Hashable:
        """The stage in which an outer iteration trains; -1 is the initial model."""
        return None

    def network(self, model: nn.Module, stage: Hashable) -> nn.Module:
        """Return the network to train in a stage; its modules belong to the model."""
        return model

    def select(self, model: nn.Module, stage: Hashable) -> None:
        """Select the forward pass of a stage in `model`."""

    def new_parts(self, model: nn.Module, state: Mapping[str, Tensor], before: Hashable,
                  after: Hashable, seed: int) -> Mapping[str, Tensor]:
        """Return the state entries that change from one stage to the next; `state` stays."""
        return {}


class Task(ABC):
    """Model, data and objective of a run.

    Every method is deterministic in its arguments and the settings of the task.
    """

    growth: Growth = Growth()
    # objf of a model that predicts the class frequencies; results below twice it are rejected
    chance_objf: float = -math.inf
    # whether `batches` can start at any minibatch without computing the earlier ones
    starts_anywhere: bool = False
    # False: a drop of the held-out objf is not a divergence, because another objective is trained
    optimizes_held_out_objf: bool = True
    # whether `example_ids` and `exclude` are implemented
    names_examples: bool = False
    # whether parameters, buffers, the optimizer, the global random generators and `job_state` are
    # all that a minibatch changes, so that a retry can continue in the middle of a job
    can_continue_jobs: bool = False
    # whether only the optimizer changes parameters, so that clipping bounds the delta of a job
    has_bounded_updates: bool = False
    # whether `loss` never waits for the GPU and uses no random numbers but those of torch's default
    # generator, so that cluster.cuda_graphs=auto can record it
    can_be_graphed: bool = False

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model with initial parameters; `seeded_model` seeds torch's generator."""

    @abstractmethod
    def shards(self) -> ShardGrid:
        """Return the units of data that jobs are assigned."""

    @abstractmethod
    def num_batches(self, shard: Shard, size: int) -> int:
        """Return the number of minibatches of about `size` examples in one pass over a shard."""

    @abstractmethod
    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        """Yield minibatches `first` to `stop` of a pass over a shard, in an order given by `seed`.

        Args:
            shard: unit of data.
            size: approximate number of examples per minibatch.
            seed: (seed of the run, outer iteration, job).
            first: index of the first minibatch. It selects from the same sequence for any value.
            stop: index after the last minibatch; None reads to the end.
        """

    def example_ids(self, shard: Shard, size: int, *, seed: tuple[int, int, int], number: int) -> Sequence[str]:
        """Return the name of each example of a minibatch of `batches`, in its order, or nothing."""
        return ()

    def exclude(self, examples: Sequence[str]) -> None:  # noqa: B027  optional
        """Leave the examples with these names out of the minibatches of the next `batches`."""

    @abstractmethod
    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        """Compute the objective of one batch, whose data are on the device of the model."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Score a model in evaluation mode on the CPU, without gradients, in another thread."""

    def prepare_evaluation(self, model: nn.Module) -> None:  # noqa: B027  optional
        """Load held-out data and check the model, so that errors appear before training starts."""

    def held_out_objf(self, model: nn.Module) -> float:
        """Return the objf on a small held-out subset; called before every commit."""
        return self.evaluate(model).valid.objf

    def prepare_job(self, model: nn.Module, *, progress: float, seed: int) -> None:
        """Prepare the model for a job.

        Args:
            model: the model of the worker.
            progress: fraction of the data processed so far, 0 to 1.
            seed: seed of the random numbers of this job.
        """
        torch.manual_seed(seed)

    def prefetch(self, items: Sequence[WorkItem]) -> None:  # noqa: B027  optional
        """Start to load data that the worker will probably read next, without waiting for it.

        Called when the first minibatch of a job has been read. The next job may read other data.
        """

    def job_state(self) -> Any:
        """Return further state that minibatches change: nested dictionaries, lists and tuples of
        tensors and picklable values.
        """
        return None

    def load_job_state(self, state: Any) -> None:  # noqa: B027  optional
        """Continue from `job_state` of another process, after `prepare_job`."""


class TaskSpec(Protocol):
    """Small picklable description from which each worker process builds its task."""

    @property
    def settings(self) -> EngineSettings: ...

    def task(self, device: torch.device) -> Task:
        """Build the task of a worker that computes on `device`."""


def seeded_model(task: Task, seed: int) -> nn.Module:
    """Build a new model of the task, and restore the random state; ConfigError for a bad one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = task.model()
        except NgsgdError:
            raise
        except Exception as error:
            raise ConfigError(f"the model of the task cannot be built ({first_line(error)}); correct the function that "
                              "returns it.") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the type of the model of the task is {type(model).__name__}; return a torch.nn.Module.")
    if lazy := [name for name, value in model.state_dict(keep_vars=True).items() if is_lazy(value)]:
        raise ConfigError(f"the model has parameters without a shape: {', '.join(lazy[:3])}; call it once on a minibatch in the "
                          "function that returns it, or replace its lazy layers.")
    wrong = [f"{name} ({str(value.dtype).removeprefix('torch.')})" for name, value in model.state_dict().items()
             if (value.is_floating_point() or value.is_complex()) and value.dtype != torch.float32]
    if wrong:
        raise ConfigError(f"the model has {', '.join(wrong[:3])}; parameters and buffers are "
                          "averaged in float32: convert them with model.float().")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameter; set requires_grad on at least one.")
    return model


def data_to_device(data: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to a device."""
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace each tensor of a batch by `function` of it; other values are unchanged."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, PackedSequence):
        # its batch sizes stay in host memory
        orders = (data.sorted_indices, data.unsorted_indices)
        return PackedSequence(function(data.data), data.batch_sizes, *(None if one is None else function(one) for one in orders))
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(map_tensors(value, function) for value in data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return mapped
        # such as the encodings of Hugging Face, whose entries are attributes, too
        found: Any = copy.copy(data)
        found.update(mapped)
        return found
    if is_dataclass(data) and not isinstance(data, type):
        found = copy.copy(data)
        for spec in fields(data):
            object.__setattr__(found, spec.name, map_tensors(getattr(data, spec.name), function))
        return found
    return data
