"""Hessian-free (Martens 2010): (C + d I)^-1 g of each minibatch by conjugate gradients, C its Gauss-Newton matrix or its Hessian.

Nothing of C is kept from one minibatch to the next but where the iteration starts: at the last direction, times a decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.errors import ConfigError
from ngsgd.ops.linalg import conjugate_gradients
from ngsgd.preconditioners.methods.second_derivatives import SecondOrderMethod
from ngsgd.preconditioners.options import EveryStepOptions
from ngsgd.preconditioners.states import State

PRODUCTS = ("ggn", "hessian")


@dataclass(frozen=True)
class HessianFreeOptions(EveryStepOptions):
    """Of Hessian-free."""

    # the model of the loss is not to be trusted far away: more than other methods take
    damping: float = 1e-2
    # of the last direction, where the iteration starts; 0: at zero
    ema_decay: float = 0.95
    # "ggn", never negative, or "hessian", where negative curvature ends the iteration
    products: str = "ggn"
    # products for each minibatch; each costs about two backward passes
    max_cg_steps: int = 10
    # norm of the residual by that of the gradient
    cg_tolerance: float = 1e-3

    def problems(self) -> list[str]:
        found = super().problems()
        if self.products not in PRODUCTS:
            found.append(f"products is {self.products!r}; choose {', '.join(PRODUCTS)}.")
        if self.max_cg_steps < 1:
            found.append(f"max_cg_steps is {self.max_cg_steps}; it must be at least 1.")
        if not self.cg_tolerance > 0.0:
            found.append(f"cg_tolerance is {self.cg_tolerance}; it must be above 0.")
        if "damping" in {key for own in (self.layer_options or {}).values() for key in own}:
            found.append("layer_options has damping; all layers are one system, so set damping.")
        return found


class HessianFree(SecondOrderMethod):
    """Hessian-free; memory is that of the graph of one minibatch and a few gradients."""

    Options = HessianFreeOptions
    # all layers are one system
    joins_bias = False

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.num_products = 0     # taken so far

    def update_curvature(self, seen: Any) -> None:
        """Nothing to keep: `apply` asks the minibatch."""

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.minibatch is None:
            raise ConfigError("HessianFree needs the minibatch's graph, which ends with step(); call step().")
        names = sorted(grads)
        shapes = [grads[name].shape for name in names]

        def parted(flat_D: Tensor) -> dict[str, Tensor]:
            parts = flat_D.split([shape.numel() for shape in shapes])
            return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

        def damped(v_D: Tensor) -> Tensor:
            found = self.product(self.options.products, parted(v_D))
            product_D: Tensor = torch.cat([found[name].flatten() for name in names]) + self.options.damping * v_D
            return product_D

        g_D = torch.cat([grads[name].flatten() for name in names])
        direction_D, taken = conjugate_gradients(damped, g_D, start_D=self._start(names), max_steps=self.options.max_cg_steps,
                                                 tolerance=self.options.cg_tolerance)
        self.num_products += taken
        found = parted(direction_D)
        if bool(direction_D.isfinite().all()):
            for name, value in found.items():
                self.statistics[name], self.weights[name] = {"direction": value.clone()}, 1.0
        else:
            self.num_skipped += 1
        return found

    def _start(self, names: list[str]) -> Tensor | None:
        if not self.options.ema_decay or any(name not in self.statistics for name in names):
            return None
        last_D = torch.cat([self.statistics[name]["direction"].flatten() for name in names])
        return last_D.mul_(self.options.ema_decay)

    def invert(self, name: str, known: State) -> State:
        return {}
