"""Sums over the minibatches of a job, for its objective and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ngsgd.training.devices import Ranks
from ngsgd.training.job import BadBatch
from ngsgd.training.task import BatchLoss
from ngsgd.training.validation.bad_batches import BatchLog


class JobSums:
    """Values of each minibatch, which stay on the device until the end of the job."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_examples = 0
        self.log = BatchLog(device.type == "cpu")
        # (objf, correct, weight), over all ranks
        self._sums: tuple[float, float, float] | None = None
        # without minibatches whose loss is not finite, if there are few
        self._finite_means: tuple[float, float] | None = None

    @property
    def num_batches(self) -> int:
        """Steps of this rank."""
        return len(self.log.losses)

    def add(self, num_examples: int, batch: BatchLoss, loss: Tensor, update: Tensor | None) -> None:
        self.num_examples += num_examples
        self.log.add(loss, batch.num_correct, batch.weight, update)

    def state(self) -> dict[str, Any]:
        """The values so far, for `load_state`."""
        return {"num_examples": self.num_examples, "log": self.log.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state` of another process."""
        self.num_examples = state["num_examples"]
        self.log.load_state(state["log"])

    def reduce(self, ranks: Ranks) -> None:
        """Compute the sums over the minibatches of all ranks; waits for the device."""
        self.log.settle()
        sums = list(torch.tensor([*self.log.sums(), self.num_examples], dtype=torch.float64, device=self.device).unbind())
        ranks.sum_(sums)
        objf, correct, weight, num_examples = map(float, sums)
        self._sums, self.num_examples = (objf, correct, weight), int(num_examples)

    def omit(self, bad: dict[int, str], found: Sequence[BadBatch]) -> None:
        """Exclude bad minibatches from the means, unless the job diverges."""
        self._finite_means = self.log.means_without(bad, found)

    def means(self) -> tuple[float, float]:
        """(objf, accuracy) per unit of weight, as in Kaldi; NaN for a shard without examples.

        `reduce` must be called before.
        """
        if self._finite_means is not None:
            return self._finite_means
        assert self._sums is not None
        objf, correct, weight = self._sums
        return (objf / weight, correct / weight) if weight else (math.nan, math.nan)
