"""Sums over the minibatches of a job, for its objective and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ngsgd.training.job import BadBatch
from ngsgd.training.ranks import Ranks
from ngsgd.training.task import BatchLoss
from ngsgd.training.validation.bad_batches import BatchLog


class JobSums:
    """Running totals that stay on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.num_examples = 0
        self.num_batches = 0
        self.log = BatchLog()
        # without minibatches whose loss is not finite, if there are few
        self._finite_means: tuple[float, float] | None = None
        self._objf, self._correct, self._weight = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, num_examples: int, batch: BatchLoss, loss: Tensor, update: Tensor | None) -> None:
        self.log.add(loss, batch.num_correct, batch.weight, update)
        self.num_examples += num_examples
        self.num_batches += 1
        self._objf -= loss
        self._correct += batch.num_correct
        self._weight += batch.weight

    def state(self) -> dict[str, Any]:
        """The sums so far, for `load_state`."""
        return {"num_examples": self.num_examples, "num_batches": self.num_batches, "log": self.log.state(),
                "sums": torch.stack([self._objf, self._correct, self._weight])}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state` of another process."""
        device = self._objf.device
        self.num_examples, self.num_batches = state["num_examples"], state["num_batches"]
        self.log.load_state(state["log"], device)
        self._objf, self._correct, self._weight = state["sums"].to(device).unbind()

    def reduce(self, ranks: Ranks) -> None:
        """Add the sums of the other ranks; the number of minibatches stays the steps of this
        rank.
        """
        num_examples = torch.tensor(float(self.num_examples), dtype=torch.float64,
                                    device=self._objf.device)
        ranks.sum_([self._objf, self._correct, self._weight, num_examples])
        self.num_examples = int(num_examples)

    def omit(self, bad: dict[int, str], found: Sequence[BadBatch]) -> None:
        """Exclude bad minibatches from the means, unless the job diverges."""
        self._finite_means = self.log.means_without(bad, found)

    def means(self) -> tuple[float, float]:
        """(objf, accuracy) per unit of weight, as in Kaldi; NaN for a shard without examples."""
        if self._finite_means is not None:
            return self._finite_means
        return tuple((torch.stack([self._objf, self._correct]) / self._weight).tolist())
