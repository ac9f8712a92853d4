"""Sums over the minibatches of a job, for its objective and accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ngsgd.training.devices import Ranks
from ngsgd.training.job import BadBatch
from ngsgd.training.task import BatchLoss
from ngsgd.training.validation.bad_batches import GRADIENT, LOSS

# a job with a larger fraction of bad minibatches diverges, unless few rows of each are at fault:
# its objective stays non-finite, and the coordinator rejects it
_MOST_BAD, _FEW_ROWS = 0.1, 0.5
_LISTS = ("losses", "corrects", "weights", "updates")


class JobSums:
    """Values of each minibatch, which stay on the device until the end of the job."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_examples = 0
        # tensors kept between the gradients of two minibatches would fragment the memory of a CPU
        self._keep: Callable[[Tensor], Tensor | float] = Tensor.item if device.type == "cpu" else Tensor.detach
        # summed loss; sums for the objective; norm of the update, NaN if it was skipped
        self.losses: list[Tensor | float] = []
        self.corrects: list[Tensor | float] = []
        self.weights: list[Tensor | float] = []
        self.updates: list[Tensor | float | None] = []
        # (objf, correct, weight): of all ranks, then without minibatches whose loss is not finite
        self._sums = (math.nan, math.nan, math.nan)

    @property
    def num_batches(self) -> int:
        """Steps of this rank."""
        return len(self.losses)

    def add(self, num_examples: int, batch: BatchLoss, loss: Tensor, update: Tensor | None) -> None:
        keep, correct, weight = self._keep, batch.num_correct, batch.weight
        self.num_examples += num_examples
        self.losses.append(keep(loss))
        self.corrects.append(keep(correct) if isinstance(correct, Tensor) else correct)
        self.weights.append(keep(weight) if isinstance(weight, Tensor) else weight)
        self.updates.append(update if update is None else keep(update))

    def state(self) -> dict[str, Any]:
        """All values as numbers, for `load_state`; waits for the device once for each kind."""
        found: dict[str, Any] = {"num_examples": self.num_examples}
        for name in _LISTS:
            values = getattr(self, name)
            tensors = [value.to(torch.float64) for value in values if isinstance(value, Tensor)]
            known = iter(torch.stack(tensors).tolist() if tensors else [])
            found[name] = [next(known) if isinstance(value, Tensor) else value for value in values]
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state` of another process."""
        self.num_examples = state["num_examples"]
        for name in _LISTS:
            setattr(self, name, list(state[name]))

    def reduce(self, ranks: Ranks) -> None:
        """Compute the sums over the minibatches of all ranks; waits for the device."""
        self.load_state(self.state())
        totals = [-_in_order(self.losses), _in_order(self.corrects), _in_order(self.weights), self.num_examples]
        sums = list(torch.tensor(totals, dtype=torch.float64, device=self.device).unbind())
        ranks.sum_(sums)
        objf, correct, weight, num_examples = map(float, sums)
        self._sums, self.num_examples = (objf, correct, weight), int(num_examples)

    def bad(self) -> dict[int, str]:
        """Index of a bad minibatch -> LOSS or GRADIENT."""
        found = {}
        for index, (loss, update) in enumerate(zip(self.losses, self.updates, strict=True)):
            if not math.isfinite(loss):
                found[index] = LOSS
            elif update is not None and math.isnan(update):
                found[index] = GRADIENT
        return found

    def omit(self, bad: dict[int, str], found: Sequence[BadBatch]) -> None:
        """Exclude bad minibatches from the means, unless the job diverges; `found` names them."""
        infinite = {index for index, reason in bad.items() if reason == LOSS}
        is_data = (len(infinite) <= max(1.0, _MOST_BAD * len(self.losses)) or all(one.share <= _FEW_ROWS for one in found))
        if infinite and is_data and len(infinite) < len(self.losses):
            kept = [index for index in range(len(self.losses)) if index not in infinite]
            loss, correct, weight = (math.fsum(float(values[index]) for index in kept)
                                     for values in (self.losses, self.corrects, self.weights))
            self._sums = -loss, correct, weight

    def means(self) -> tuple[float, float]:
        """(objf, accuracy) per unit of weight, as in Kaldi; NaN for a shard without examples.

        `reduce` must be called before.
        """
        objf, correct, weight = self._sums
        return (objf / weight, correct / weight) if weight else (math.nan, math.nan)


def _in_order(values: Sequence[Tensor | float]) -> float:
    """Sum of float64 numbers; `sum` of newer versions of Python compensates, with other bits."""
    total = 0.0
    for value in values:
        total += float(value)
    return total
