"""Adam, AdamW and Muon of torch.optim as preconditioners.

The direction is the update at learning rate 1. Each optimizer runs on a copy of the parameters:
zeros before a step are minus the direction after it. Directions do not scale with the gradient, so
a GradScaler must unscale first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.config.traits import TRAITS
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.states import Layout


class Adam(Preconditioner):
    """torch.optim.Adam as a preconditioner.

    Args:
        model: the module to precondition.
        damping: eps, added to the root of second moments. Default 1e-8.
        ema_decay: beta 2, decay of second moments. Default 0.999.
        momentum: beta 1, decay of the gradient average, in [0, 1). Default 0.9.
        weight_decay: multiple of the parameter in the gradient. Default 0.
        options: see `Preconditioner`; layer_options is not supported.

    Source: Kingma and Ba 2015.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = Adam(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    damping: float = 1e-8
    ema_decay: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.0

    traits = TRAITS["adam"]

    def problems(self) -> list[str]:
        found = [*super().problems(), *self.decay("momentum"), *self.at_least("weight_decay", 0)]
        if self.layer_options:
            found.append("layer_options is set; these methods have no settings of single layers.")
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        # by parameter, from its first step on
        self._copies: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        """Create the torch optimizer of one parameter, with learning rate 1."""
        return torch.optim.Adam([copy], lr=1.0, betas=(self.momentum, self.ema_decay), eps=self.damping,
                                weight_decay=self.weight_decay)

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self.blocks.shape(name)
        return {"statistics.step*": (), "statistics.exp_avg": shape, "statistics.exp_avg_sq": shape}

    def forget(self, name: str) -> None:
        super().forget(name)
        self._copies.pop(name, None)
        self._optimizers.pop(name, None)

    def viewed(self, x: Tensor) -> Tensor:
        """Return the shape in which the torch optimizer gets a parameter."""
        return x.detach()

    def update_curvature(self, seen: Any) -> None:
        """Do nothing; `apply` updates the moments."""

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(grads)
        for name in self.finite(grads):
            found[name] = self.parameter_direction(name, grads[name], self.parameters[name])
            self.statistics.weights[name] = 1.0
        return found

    def parameter_direction(self, name: str, g: Tensor, p: Tensor) -> Tensor:
        """Return the direction of one parameter and update its moments."""
        if name not in self._copies or self._copies[name].dtype != g.dtype or self._copies[name].device != g.device:
            self._copies[name] = nn.Parameter(torch.zeros_like(self.viewed(g)))
            self._optimizers[name] = self.optimizer(name, self._copies[name])
        copy = self._copies[name]
        # With weight decay start from the parameter, because decay is relative to it.
        before = torch.zeros_like(copy)
        if self.weight_decay:
            before = self.viewed(self.blocks.oriented(name, p)).to(copy)
        copy.copy_(before)
        copy.grad = self.viewed(g).to(copy)
        self._optimizers[name].state[copy] = self.statistics.setdefault(name, {})
        with torch.enable_grad():
            self._optimizers[name].step()
        copy.grad = None
        return (before - copy.detach()).view_as(g)

    def finite(self, grads: Mapping[str, Tensor]) -> list[str]:
        """Return the names of finite gradients; count the minibatch as skipped if others exist."""
        if not grads:
            return []
        flags = [g.isfinite().all() for g in grads.values()]
        # One wait for all of them.
        is_finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        if not all(is_finite):
            self.note_skipped()
        return [name for name, one in zip(grads, is_finite, strict=True) if one]

    def refresh(self) -> None:
        """Do nothing; the moments are applied directly."""


class AdamW(Adam):
    """torch.optim.AdamW as a preconditioner.

    Args:
        model: the module to precondition.
        weight_decay: multiple of the parameter in the direction. Default 0.01.
        options: see `Adam`.

    Source: Loshchilov and Hutter 2019.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = AdamW(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    weight_decay: float = 0.01

    traits = TRAITS["adamw"]

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        return torch.optim.AdamW([copy], lr=1.0, betas=(self.momentum, self.ema_decay), eps=self.damping,
                                 weight_decay=self.weight_decay)


class Muon(AdamW):
    """torch.optim.Muon for matrices (dimensions after the first are flattened), AdamW for vectors.

    Args:
        model: the module to precondition.
        momentum: momentum of Muon, and beta 1 of AdamW for vectors. Default 0.95.
        orthogonal_steps: Newton-Schulz iterations. Default 5.
        options: see `AdamW`.

    Source: Jordan et al. 2024.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = Muon(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    momentum: float = 0.95
    weight_decay: float = 0.0
    orthogonal_steps: int = 5

    traits = TRAITS["muon"]

    def problems(self) -> list[str]:
        return [*super().problems(), *self.at_least("orthogonal_steps", 1)]

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self.blocks.shape(name)
        return super().layout(name, entry) if len(shape) < 2 else {"statistics.momentum_buffer": self.blocks.sides(name)[::2]}

    def viewed(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1) if x.ndim > 1 else x.detach()

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        if copy.ndim < 2:
            return super().optimizer(name, copy)
        return torch.optim.Muon([copy], lr=1.0, momentum=self.momentum, weight_decay=self.weight_decay,
                                ns_steps=self.orthogonal_steps)
