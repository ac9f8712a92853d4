"""Moving averages of the statistics of a method."""

from __future__ import annotations

import torch

from ngsgd.preconditioners.states import State, kept


class CurvatureAverage(dict[str, State]):
    """Sums of moving averages by weight; `weights` are their total weights, for the bias correction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, float] = {}

    def put(self, name: str, state: State, weight: float = 1.0) -> None:
        """Replace the statistics of a weight."""
        self[name], self.weights[name] = state, weight

    def add(self, name: str, new: State, decay: float) -> bool:
        """Add the statistics of a minibatch; False, without effect, if they are not finite."""
        if not is_finite(new):
            return False
        if name not in self or decay == 0.0:
            self.put(name, {key: kept(value) for key, value in new.items()})
            # The first minibatch gets the same weight as any other.
            if decay:
                self.weights[name] = 1.0 - decay
                torch._foreach_mul_(list(self[name].values()), 1.0 - decay)
            return True
        for key, value in new.items():
            self[name][key].mul_(decay).add_(value, alpha=1.0 - decay)
        self.decayed(name, decay)
        return True

    def decayed(self, name: str, decay: float) -> None:
        """Update the weight of a sum to which a minibatch was added."""
        self.weights[name] = decay * self.weights[name] + 1.0 - decay

    def mean(self, name: str) -> State:
        """Return the averaged statistics of a weight."""
        weight = self.weights[name]
        return {key: value if weight == 1.0 else value / weight for key, value in self[name].items()}

    def forget(self, name: str) -> None:
        """Discard the statistics of a weight."""
        self.pop(name, None)
        self.weights.pop(name, None)


def is_finite(state: State) -> bool:
    """Return whether statistics are finite, in one pass; elementwise isfinite() takes four."""
    return all(bool(value.sum().isfinite()) for value in state.values())
