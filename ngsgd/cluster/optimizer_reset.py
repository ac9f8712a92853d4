"""Reset of the state of any torch optimizer, without its settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class OptimizerReset:
    """The state that an optimizer has now, and its return to it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._initial = copy.deepcopy(optimizer.state_dict())
        indices = self._indices(self._initial)
        # by parameter, because indices change when groups are added
        self._values = [(p, self._initial["state"][indices[id(p)]]) for group in optimizer.param_groups for p in group["params"]
                        if indices[id(p)] in self._initial["state"]]

    def apply(self) -> None:
        """Restore the state (momentum, moments, Fisher estimates); groups and settings stay."""
        optimizer, now = self._optimizer, self._optimizer.state_dict()
        groups = [dict(group) for group in optimizer.param_groups]
        indices = self._indices(now)
        settings = {key: value for key, value in now.items() if key != "state" and hasattr(optimizer, key)}
        state = {indices[id(p)]: copy.deepcopy(values) for p, values in self._values if id(p) in indices}
        optimizer.load_state_dict({**copy.deepcopy(self._initial), **settings, "state": state})
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            # also objects that torch copies, such as a learning rate in a tensor
            group.update(before)

    def _indices(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Return the index of each parameter in a state, by id()."""
        return {id(p): index for group, packed in zip(self._optimizer.param_groups, state["param_groups"], strict=True)
                for p, index in zip(group["params"], packed["params"], strict=True)}


def clear_not_finite(optimizer: Optimizer) -> None:
    """Set tensors of the state of an optimizer that are not finite to 0."""
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor) and not bool(value.isfinite().all()):
                value.zero_()
