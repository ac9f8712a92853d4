"""How often update-norm limits shortened the steps of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops.max_change import Limits
from ngsgd.optim.updates import DeviceNumbers

# Steps whose counts are summed in one operation.
_MANY_UNCOUNTED = 64


@dataclass(frozen=True)
class StepActivity:
    """How often update-norm limits were active since the last `reset_activity`."""

    num_steps: int
    # steps skipped because of a non-finite gradient
    num_skipped: int
    # component -> fraction of steps that its max_change shortened, 0 to 1
    layer_share: dict[str, float]
    # fraction of steps that max_param_change shortened, 0 to 1
    model_share: float


class LimitCounts:
    """Counts of steps, skipped steps, and steps that each limit shortened; on the device."""

    def __init__(self, num_groups: int) -> None:
        self.num_steps = 0
        # skipped, shortened by max_param_change, shortened by max_change of each group
        self.hits = torch.zeros(2 + num_groups, dtype=torch.int64)
        # limits of the last steps, which `hits` does not include yet
        self._uncounted: list[tuple[list[int], Limits]] = []
        self._constant = DeviceNumbers()

    def add(self, limits: Limits, indices: list[int]) -> None:
        """Count a step whose groups `indices` have limits."""
        self.num_steps += 1
        # After model.double() or model.to(device) the numbers have another kind.
        if self._uncounted and (self._uncounted[0][0] != indices or len(self._uncounted) >= _MANY_UNCOUNTED
                                or self._uncounted[0][1].total.dtype != limits.total.dtype
                                or self._uncounted[0][1].total.device != limits.total.device):
            self.sum_up()
        self._uncounted.append((indices, limits))

    def add_without_limits(self, is_skipped: Tensor) -> None:
        """Count a step in which no update has a limit."""
        self.num_steps += 1
        self.hits = self.hits.to(is_skipped.device)
        self.hits[0] += is_skipped

    def sum_up(self) -> None:
        """Add the steps since the last call to `hits`, on the device in few operations."""
        if not self._uncounted:
            return
        (indices, *_), all_limits = self._uncounted[0], [limits for _, limits in self._uncounted]
        self._uncounted = []
        is_skipped_S1 = torch.stack([limits.total for limits in all_limits]).isnan()[:, None]
        ratios_SC = torch.stack([torch.cat([limits.model_ratio[None], limits.layer_ratios_C]) for limits in all_limits])
        hits_SC = torch.cat([is_skipped_S1, (ratios_SC < 1.0) & ~is_skipped_S1], dim=1)
        columns = self._constant(hits_SC, 0, 1, *(i + 2 for i in indices), dtype=torch.int64)
        self.hits = self.hits.to(hits_SC.device).index_add_(0, columns, hits_SC.sum(dim=0))

    def grow(self, num_groups: int) -> None:
        """Count the limits of further groups, too."""
        self.hits = torch.cat([self.hits, self.hits.new_zeros(num_groups + 2 - len(self.hits))])

    def activity(self, names: Sequence[str]) -> StepActivity:
        """Return the counts as fractions; waits for the device once."""
        self.sum_up()
        num_skipped, model_hits, *layer_hits = self.hits.tolist()
        steps = max(self.num_steps, 1)
        return StepActivity(self.num_steps, num_skipped, {name: hits / steps for name, hits in zip(names, layer_hits, strict=True)},
                            model_hits / steps)

    def state(self) -> dict[str, Any]:
        """Return the counts; the tensor is not copied."""
        self.sum_up()
        return {"num_steps": self.num_steps, "counts": self.hits}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `state`."""
        self.num_steps, self.hits, self._uncounted = state["num_steps"], state["counts"].to(device), []
