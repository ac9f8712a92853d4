"""Base class of tasks that are defined by functions for the model, the loss and the metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.training.records import SubsetScore
from ngsgd.training.task import BatchLoss, Evaluation, Task

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
        self.model_fn = model_fn
        self.loss_fn = loss_fn
        self.metrics_fn = metrics_fn
        self.loss_reduction = loss_reduction
        self.weight_fn = weight_fn

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
        return self._loss(model, data, self._num_examples_of(data))

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
        """Return why `loss_reduction` seems wrong, or "" without a sign of it.

        Args:
            model: a model, which is set to evaluation mode.
        """
        return ""

    @torch.no_grad()
    def held_out_objf(self, model: nn.Module) -> float:
        return self._score(model, self.check_subset, with_metrics=False)[0]

    def _loss(self, model: nn.Module, batch: Any, num_examples: int) -> BatchLoss:
        loss = self.loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {shape}; return a scalar tensor.")
        weight = num_examples if self.weight_fn is None else self.weight_fn(batch)
        return BatchLoss(loss * weight if self.loss_reduction == "mean" else loss, weight)

    def _num_examples_of(self, batch: Any) -> int:
        if self.weight_fn is not None:
            # `_loss` does not use it
            return 0
        first = batch
        while not isinstance(first, Tensor):
            try:
                first = next(iter(first.values() if isinstance(first, Mapping) else first))
            except (TypeError, StopIteration):
                raise ConfigError("the first dimension of a minibatch must be the number of "
                                  "examples; give weight_fn if it is not.") from None
        return len(first)

    def _score(self, model: nn.Module, batches: Sequence[tuple[Any, int]], *,
               with_metrics: bool = True) -> tuple[float, dict[str, float]]:
        """Return minus the mean loss, and the means of the metrics."""
        total = weight = 0.0
        sums: dict[str, float] = {}
        for batch, num_examples in batches:
            found = self._loss(model, batch, num_examples)
            total += float(found.total)
            weight += float(found.weight)
            if self.metrics_fn is not None and with_metrics:
                for name, value in self.metrics_fn(model, batch).items():
                    sums[name] = sums.get(name, 0.0) + float(value) * float(found.weight)
        return -total / weight, {name: value / weight for name, value in sums.items()}
