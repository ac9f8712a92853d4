"""Hessian-free optimization: solve (C + d I) x = g for each minibatch by conjugate gradients.

C is the Gauss-Newton matrix or the Hessian of the minibatch. Only the start of the iteration
depends on earlier minibatches: it is the last direction times a decay. Source: Martens 2010.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ngsgd.config.traits import TRAITS
from ngsgd.errors import ConfigError
from ngsgd.ops.linalg import conjugate_gradients
from ngsgd.preconditioners.blocks import flat, unflat
from ngsgd.preconditioners.methods.second_derivatives import SecondOrderMethod
from ngsgd.preconditioners.options import own_options
from ngsgd.preconditioners.states import Layout, State


class HessianFree(SecondOrderMethod):
    """Hessian-free optimization.

    It needs memory for the graph of one minibatch and a few gradients.

    Args:
        model: the module to precondition.
        products: "ggn" (default) or "hessian"; negative curvature of the latter ends the iteration.
        max_cg_steps: products per minibatch, each about two backward passes. Default 10.
        cg_tolerance: norm of the residual relative to the gradient norm. Default 1e-3.
        ema_decay: factor of the last direction at the start of the iteration. Default 0.95.
        options: see `Preconditioner`.

    Source: Martens 2010.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = HessianFree(model, max_cg_steps=3)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    products: str = "ggn"
    max_cg_steps: int = 10
    cg_tolerance: float = 1e-3

    # All layers are one linear system.
    traits = TRAITS["hessian_free"]

    def problems(self) -> list[str]:
        found = [*super().problems(), *self.choice("products", "ggn", "hessian"), *self.at_least("max_cg_steps", 1)]
        if not self.cg_tolerance > 0.0:
            found.append(f"cg_tolerance is {self.cg_tolerance}; it must be above 0.")
        if "damping" in own_options(self.layer_options):
            found.append("layer_options has damping; all layers are one linear system, so set damping.")
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_products = 0     # products so far
        self.is_gauss_newton = self.products == "ggn"

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return {"statistics.direction": self.blocks.shape(name)}

    def update_curvature(self, seen: Any) -> None:
        """Keep nothing; `apply` uses the graph of the minibatch."""

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.minibatch is None:
            raise ConfigError("HessianFree needs the graph of the minibatch, which step() frees; "
                              "call step().")

        def damped(v_D: Tensor) -> Tensor:
            return flat(self.product(self.products, unflat(v_D, grads))) + self.damping * v_D

        g_D, start_D = flat(grads), None
        if self.ema_decay and all(name in self.statistics for name in grads):
            start_D = flat({name: self.statistics[name]["direction"] for name in grads}).mul_(self.ema_decay)
        direction_D, taken = conjugate_gradients(damped, g_D, start_D=start_D, max_steps=self.max_cg_steps,
                                                 tolerance=self.cg_tolerance)
        self.num_products += taken
        found = unflat(direction_D, grads)
        # The iterates of a gradient that is not finite are those of the last minibatch.
        if bool(direction_D.isfinite().all()) and bool(g_D.sum().isfinite()):
            for name, value in found.items():
                self.statistics.put(name, {"direction": value.clone()})
        else:
            self.note_skipped()
        return found

    def invert(self, name: str, known: State) -> State:
        return {}
