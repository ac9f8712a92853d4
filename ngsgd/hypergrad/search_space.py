"""Tuned hyperparameters as one vector of logarithms, and the plan of such a vector.

Letters: D tuned numbers (theta), K knots of the learning-rate schedule, T steps, G layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ngsgd.arguments import check_fields
from ngsgd.errors import ConfigError
from ngsgd.hypergrad.hyperparameters import HyperparameterPlan

PARTS = ("schedule", "layer_lr", "l2", "momentum", "max_change", "init_scale")
# Initial value of l2 if it is tuned from 0, which has no logarithm.
_TINY_L2 = 1e-6


@dataclass(frozen=True)
class BaseHyperparameters:
    """Hyperparameters before tuning; a space changes some of them.

    Example:
        >>> BaseHyperparameters(lr_initial=0.1, lr_final=0.01).lr_final
        0.01
    """

    lr_initial: float            # of a job
    lr_final: float
    momentum: float = 0.9
    l2: float = 0.0
    max_change: float = 0.0      # 0 = none
    max_param_change: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class HyperSpace:
    """A box around `settings` in logarithms (of 1 - momentum for momentum).

    Args:
        settings: hyperparameters before tuning.
        parts: any of schedule, layer_lr, l2, momentum, max_change, init_scale. All but schedule and
            momentum have one number per layer.
        knots: number of knots of the schedule, at equal distances with geometric interpolation. 2:
            initial and final rate, exponential decay.
        rates: maximum factor between learning rates and those of `settings`.
        others: the same for other hyperparameters.
    """

    settings: BaseHyperparameters
    layers: tuple[str, ...]
    num_steps: int
    num_jobs: int = 1
    num_outer_iters: int = 1
    parts: tuple[str, ...] = ("schedule", "layer_lr", "l2", "momentum")
    knots: int = 10
    rates: float = 30.0
    others: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self)
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ConfigError(f"tune.space has {', '.join(unknown)}; choose from "
                              f"{', '.join(PARTS)}.")
        if not self.parts or self.knots < 2:
            raise ConfigError(f"tune.space is {list(self.parts)} with {self.knots} knots; select a "
                              "part to tune, with at least 2 knots.")
        if "max_change" in self.parts and not self.settings.max_change:
            raise ConfigError("tune.space has max_change, but optimizer.max_change is 0, no limit; "
                              "set an initial limit.")

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Position of each part in theta."""
        sizes = {"schedule": self.knots, "momentum": 1}
        found, first = {}, 0
        for part in PARTS:
            if part in self.parts:
                size = sizes.get(part, len(self.layers))
                found[part] = slice(first, first + size)
                first += size
        return found

    @property
    def size(self) -> int:
        r"""D"""
        return sum(part.stop - part.start for part in self.slices.values())

    def names(self) -> list[str]:
        """Names of the D numbers."""
        def of(part: str) -> list[str]:
            if part == "schedule":
                return [f"lr at {index / (self.knots - 1):.2f}" for index in range(self.knots)]
            return ["momentum"] if part == "momentum" else [f"{part} of {layer}" for layer in self.layers]
        return [name for part in self.slices for name in of(part)]

    def center(self) -> Tensor:
        """Theta of `settings`."""
        s = self.settings
        starts = {"schedule": self._exponential(s.lr_initial, s.lr_final), "momentum": [math.log(1.0 - s.momentum)],
                  "layer_lr": [0.0] * len(self.layers), "l2": [math.log(s.l2 or _TINY_L2)] * len(self.layers),
                  "max_change": [math.log(s.max_change or 1.0)] * len(self.layers), "init_scale": [0.0] * len(self.layers)}
        return torch.tensor([value for part in self.slices for value in starts[part]], dtype=torch.float64)

    def reach(self) -> Tensor:
        """Maximum distance of each number from the center, D."""
        reaches = {"schedule": self.rates, "layer_lr": self.others, "l2": self.others ** 2, "momentum": self.others,
                   "max_change": self.others, "init_scale": self.others ** 0.5}
        return torch.tensor([math.log(reaches[part]) for part, where in self.slices.items()
                             for _ in range(where.stop - where.start)], dtype=torch.float64)

    def clamp(self, theta_D: Tensor) -> Tensor:
        """Return the nearest point of the box."""
        center_D, reach_D = self.center(), self.reach()
        clamped_D = torch.minimum(torch.maximum(theta_D, center_D - reach_D), center_D + reach_D)
        if "momentum" in self.slices:
            clamped_D[self.slices["momentum"]] = clamped_D[self.slices["momentum"]].clamp(math.log(0.002), math.log(0.9))
        return clamped_D

    def with_rates(self, theta_D: Tensor, lr_initial: float, lr_final: float) -> Tensor:
        """Return theta with the exponential schedule between two rates."""
        changed_D = theta_D.clone()
        changed_D[self.slices["schedule"]] = torch.tensor(self._exponential(lr_initial, lr_final), dtype=torch.float64)
        return changed_D

    def scaled(self, theta_D: Tensor, factor: float) -> Tensor:
        """Return theta with all learning rates multiplied."""
        changed_D = theta_D.clone()
        changed_D[self.slices["schedule"]] += math.log(factor)
        return changed_D

    def build(self, theta_D: Tensor) -> HyperparameterPlan:
        """Return the plan, differentiable with respect to theta."""
        layers, s = len(self.layers), self.settings

        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64)
        values = {part: theta_D[where] for part, where in self.slices.items()}
        lr_T = self._schedule(values).exp()
        factor_G = values["layer_lr"].exp() if "layer_lr" in values else full(1.0, layers)
        momentum = 1.0 - values["momentum"].exp() if "momentum" in values else full(s.momentum, 1)
        return HyperparameterPlan(
            lr_T[:, None] * factor_G, momentum.expand(self.num_steps, layers),
            values["l2"].exp() if "l2" in values else full(s.l2, layers),
            values["init_scale"].exp() if "init_scale" in values else full(1.0, layers),
            values["max_change"].exp() if "max_change" in values else full(s.max_change, layers),
            full(s.max_param_change), full(1.0, self.num_outer_iters, self.num_jobs))

    def values(self, theta_D: Tensor) -> dict[str, list[float]]:
        """Return the tuned values by part: rates at the knots, factors, l2, momentum."""
        found = {part: theta_D[where].exp().tolist() for part, where in self.slices.items()}
        if "momentum" in found:
            found["momentum"] = [1.0 - found["momentum"][0]]
        return found

    def _exponential(self, lr_initial: float, lr_final: float) -> list[float]:
        first, last = math.log(lr_initial), math.log(lr_final)
        return [first + (last - first) * index / (self.knots - 1) for index in range(self.knots)]

    def _schedule(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return logarithms of the rates, T: piecewise linear through the knots."""
        s = self.settings
        knots_K = values.get("schedule", torch.tensor(self._exponential(s.lr_initial, s.lr_final), dtype=torch.float64))
        return interpolation(self.num_steps, self.knots) @ knots_K


def interpolation(num_steps: int, num_knots: int) -> Tensor:
    """Return the matrix (steps x knots) of piecewise linear interpolation between equidistant
    knots.
    """
    at_T = torch.arange(num_steps, dtype=torch.float64) * ((num_knots - 1) / max(1, num_steps - 1))
    distance_TK = (at_T[:, None] - torch.arange(num_knots, dtype=torch.float64)).abs()
    return (1.0 - distance_TK).clamp(min=0.0)
