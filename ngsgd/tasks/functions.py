"""Base class of tasks that are defined by functions for the model, the loss and the metrics."""

from __future__ import annotations

import functools
import math
import pickle
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ngsgd import imports
from ngsgd.config import TaskConfig
from ngsgd.errors import ConfigError, DataError, NgsgdError
from ngsgd.imports import first_line
from ngsgd.training.records import SubsetScore
from ngsgd.training.settings import EngineSettings
from ngsgd.training.task import Batch, BatchLoss, Evaluation, Task

ModelFunction = Callable[[], nn.Module]
LossFunction = Callable[[nn.Module, Any], Tensor]
MetricsFunction = Callable[[nn.Module, Any], Mapping[str, Any]]
WeightFunction = Callable[[Any], Any]
CollateFunction = Callable[[list[Any]], Any]
LossReduction = Literal["mean", "sum"]

# examples of the check before each commit, and of a minibatch when a model is scored
NUM_CHECK_EXAMPLES = 128


class FunctionTask(Task):
    """Base of tasks whose model, loss and metrics are functions; subclasses read the data."""

    can_continue_jobs = True

    def __init__(self, model_fn: ModelFunction, loss_fn: LossFunction, *, metrics_fn: MetricsFunction | None,
                 loss_reduction: LossReduction, weight_fn: WeightFunction | None) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction is {loss_reduction!r}; choose mean or sum.")
        given = {"model_fn": model_fn, "loss_fn": loss_fn, "metrics_fn": metrics_fn, "weight_fn": weight_fn}
        for name, function in given.items():
            is_missing = function is None and name in ("metrics_fn", "weight_fn")
            if not is_missing and (not callable(function) or (name == "model_fn" and isinstance(function, nn.Module))):
                raise ConfigError(f"{name} is of type {type(function).__name__}; give a function"
                                  f"{' that returns a new model' if name == 'model_fn' else ''}.")
        self.model_fn, self.loss_fn, self.metrics_fn = model_fn, loss_fn, metrics_fn
        self.loss_reduction, self.weight_fn = loss_reduction, weight_fn

    @property
    @abstractmethod
    def train_subset(self) -> Sequence[tuple[Any, int]]:
        """Minibatches of training examples to score, each with its number of examples."""

    @property
    @abstractmethod
    def valid_subset(self) -> Sequence[tuple[Any, int]]:
        """Minibatches of validation examples, each with its number of examples."""

    @property
    @abstractmethod
    def check_subset(self) -> Sequence[tuple[Any, int]]:
        """At most 128 validation examples, scored before each commit."""

    def model(self) -> nn.Module:
        return self.model_fn()

    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        found = self._loss(model, data, num_rows(data) if self.weight_fn is None else 0)
        if torch.is_grad_enabled() and not found.total.requires_grad:
            raise ConfigError("the loss of the task does not depend on the parameters of the model; correct loss_fn, which must "
                              "not call detach(), item() or torch.no_grad().")
        return found

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Evaluation:
        figures: dict[str, float] = {}
        scores = {}
        for name, examples in (("train", self.train_subset), ("valid", self.valid_subset)):
            objf, means = self._score(model, examples)
            scores[name] = SubsetScore(objf, means.get("accuracy", 0.0))
            figures |= {f"{name}/{metric}": value for metric, value in means.items()}
        return Evaluation(scores["train"], scores["valid"], figures)

    def prepare_evaluation(self, model: nn.Module) -> None:
        """Load the held-out examples, and check loss and metrics on a few of them."""
        few = self.check_subset[:1]
        with torch.no_grad():
            model.eval()
            self._score(model, few)

    def wrong_reduction(self, model: nn.Module) -> str:
        """Return why `loss_reduction` seems wrong for a model in evaluation mode, or ""."""
        return ""

    @torch.no_grad()
    def held_out_objf(self, model: nn.Module) -> float:
        return self._score(model, self.check_subset, with_metrics=False)[0]

    def _loss(self, model: nn.Module, batch: Any, num_examples: int) -> BatchLoss:
        loss = self.loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            raise ConfigError(f"loss_fn returned {_described(loss)}; return a scalar tensor of floating-point numbers.")
        weight = num_examples if self.weight_fn is None else self.weight_fn(batch)
        if not _is_scalar(weight):
            raise ConfigError(f"weight_fn returned {_described(weight)}; return a number.")
        return BatchLoss(loss * weight if self.loss_reduction == "mean" else loss, weight)

    def _score(self, model: nn.Module, batches: Sequence[tuple[Any, int]], *,
               with_metrics: bool = True) -> tuple[float, dict[str, float]]:
        """Return minus the mean loss, and the means of the metrics."""
        total = weight = 0.0
        sums: dict[str, float] = {}
        for batch, num_examples in batches:
            found = self._loss(model, batch, num_examples)
            total += float(found.total)
            weight += float(found.weight)
            if self.metrics_fn is None or not with_metrics:
                continue
            metrics = self.metrics_fn(model, batch)
            if not isinstance(metrics, Mapping):
                raise ConfigError(f"metrics_fn returned {_described(metrics)}; return means by "
                                  "name, such as {\"accuracy\": 0.9}.")
            for name, value in metrics.items():
                if not isinstance(name, str) or not _is_scalar(value):
                    raise ConfigError(f"metrics_fn returned {_described(value)} for {name!r}; "
                                      "return one real number for each name.")
                sums[name] = sums.get(name, 0.0) + float(value) * float(found.weight)
        if not (math.isfinite(weight) and weight > 0.0):
            raise ConfigError(f"the weight of the examples that are scored is {weight}; correct weight_fn.")
        return -total / weight, {name: value / weight for name, value in sums.items()}


def _is_scalar(value: Any) -> bool:
    """Whether a value is one real number: of Python, NumPy or torch."""
    if isinstance(value, (Tensor, np.ndarray)):
        is_complex = value.is_complex() if isinstance(value, Tensor) else np.iscomplexobj(value)
        return len(value.shape) == 0 and not is_complex
    return isinstance(value, (Real, np.bool_))


def _described(value: Any) -> str:
    if not hasattr(value, "shape"):
        return f"a value of type {type(value).__name__}"
    return f"a {type(value).__name__} of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class ImportedTask:
    """A task named by `task._target_`; every process imports the module and calls the function."""

    settings: EngineSettings
    config: TaskConfig

    def task(self, device: torch.device) -> Task:
        """Call the function with `task.args`."""
        name = self.config._target_
        factory = imports.find(name, self.config.search_path, "task", "an ngsgd.training.task.Task")
        return _called(factory, name, dict(self.config.args or {}))


@dataclass(frozen=True)
class GivenTask:
    """A task, or a function that returns one, from a Python program."""

    settings: EngineSettings
    given: Task | Callable[[], Task]

    def task(self, device: torch.device) -> Task:
        """Return the task, or call the function."""
        if isinstance(self.given, Task):
            return self.given
        return _called(self.given, name_of(self.given), {})

    def require_picklable(self) -> None:
        """Raise ConfigError if the task cannot be sent to a worker process."""
        try:
            pickle.dumps(self.given)
        except Exception as error:
            raise ConfigError(
                f"the task cannot be sent to worker processes ({imports.first_line(error)}). "
                "Define its functions with def at the top of a module or script, or pass "
                "ngsgd.train a function that returns the task, or train in this process with "
                "cluster='in_process'.") from error


def name_of(given: Task | Callable[[], Task]) -> str:
    """Name of a task or of the function that returns it."""
    if isinstance(given, functools.partial):
        return name_of(given.func)
    return getattr(given, "__name__", type(given).__name__)


def _called(factory: Callable[..., Any], name: str, args: dict[str, Any]) -> Task:
    try:
        task = factory(**args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} failed when called with {args} ({imports.first_line(error)}); "
                          "correct the function or task.args.") from error
    if not isinstance(task, Task):
        raise ConfigError(f"{name} returned a {type(task).__name__}; return a task, such as ngsgd.tasks.DatasetTask.")
    return task


# characters of a description in a message
_LONGEST_SHOWN = 200


def collated(found: Sequence[Any], name_of: Callable[[int], str], collate_fn: Callable[[list[Any]], Any], *,
             has_weight: bool) -> Batch:
    """Convert examples to a minibatch; `name_of` names the example at a place in a message.

    DataError: an example is missing or unlike the first; ConfigError: `collate_fn` fails otherwise.
    """
    try:
        data = collate_fn(list(found))
    except NgsgdError:
        raise
    except Exception as error:
        kinds = [_description(example) for example in found]
        for place, kind in enumerate(kinds):
            if found[place] is None:
                raise DataError(f"{name_of(place)} is None; return an example, or drop None in collate_fn.") from error
            if kind != kinds[0]:
                raise DataError(f"{name_of(place)} is {kind}, but {name_of(0)} is {kinds[0]}, and collate_fn cannot combine them "
                                f"({first_line(error)}); make them equal, or pad them in collate_fn.") from error
        raise ConfigError(f"collate_fn failed on {len(found)} examples, the first of them {name_of(0)}, which is {kinds[0]} "
                          f"({first_line(error)}); correct collate_fn.") from error
    # A collate_fn may drop None; a weight_fn replaces the number of examples.
    num_examples = sum(example is not None for example in found)
    if not has_weight and (counted := num_rows(data)) != num_examples:
        raise ConfigError(f"a minibatch of {num_examples} examples seems to have {counted}, by the first dimensions of its "
                          "tensors; give weight_fn, which returns the total weight of a minibatch, such as its number of examples.")
    return Batch(data, num_examples or len(found))


def _description(example: Any) -> str:
    text = type(example).__name__
    if hasattr(example, "shape"):
        text += f"{list(example.shape)}"
    elif isinstance(example, Mapping):
        text = "{" + ", ".join(f"{key}: {_description(value)}" for key, value in example.items()) + "}"
    elif isinstance(example, (list, tuple)):
        text = "(" + ", ".join(map(_description, example)) + ")"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def num_rows(batch: Any) -> int:
    """Return the number of examples of a minibatch: the most common first dimension of its leaves.

    The first of equally common ones decides. Raises ConfigError if no leaf has rows.
    """
    if not (sizes := Counter(_sizes(batch, is_outermost=True))):
        raise ConfigError("a minibatch has no tensor whose first dimension is the number of examples; give weight_fn, which "
                          "returns the total weight of a minibatch, such as its number of examples.")
    return sizes.most_common(1)[0][0]


def _sizes(data: Any, *, is_outermost: bool = False) -> Iterator[int]:
    if isinstance(data, PackedSequence):
        yield int(data.batch_sizes[0])
    elif isinstance(data, (Tensor, np.ndarray)):
        if data.ndim:
            yield data.size(0) if isinstance(data, Tensor) else len(data)
    elif isinstance(data, Mapping):
        yield from chain.from_iterable(map(_sizes, data.values()))
    elif is_dataclass(data) and not isinstance(data, type):
        yield from chain.from_iterable(_sizes(getattr(data, spec.name)) for spec in fields(data))
    elif isinstance(data, (list, tuple)):
        is_column = not is_outermost and not hasattr(data, "_fields")
        sizes = [list(_sizes(one)) for one in data]
        if not any(isinstance(one, (Tensor, np.ndarray, Mapping, list, tuple)) or is_dataclass(one) for one in data):
            # names or numbers, one per example
            if len({type(one) for one in data}) == 1:
                yield len(data)
        elif is_column and (all(isinstance(one, Mapping) for one in data) or any(one != sizes[0] for one in sizes)):
            # one entry per example, such as images of several sizes, or mappings with their boxes
            yield len(data)
        else:
            yield from chain.from_iterable(sizes[:1] if is_column else sizes)


def read(dataset: Any, indices: Sequence[int], name: str) -> list[Any]:
    """Return examples of a dataset, which messages call `name`; DataError with a bad index."""
    if (at_once := getattr(dataset, "__getitems__", None)) is not None:
        try:
            return list(at_once(list(indices)))
        except NgsgdError:
            raise
        except Exception as error:
            # which one
            _one_by_one(dataset, indices, name)
            raise DataError(f"{name} fails on the examples {list(indices)[:8]} together ({first_line(error)}); correct "
                            "its __getitems__.") from error
    return _one_by_one(dataset, indices, name)


def _one_by_one(dataset: Any, indices: Sequence[int], name: str) -> list[Any]:
    found = []
    for index in indices:
        try:
            found.append(dataset[index])
        except NgsgdError:
            raise
        except Exception as error:
            raise DataError(f"example {index} of {name} cannot be read ({first_line(error)}); correct its __getitem__ or "
                            "the data, and keep its length.") from error
    return found
