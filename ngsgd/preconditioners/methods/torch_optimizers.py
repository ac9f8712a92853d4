"""Adam, AdamW and Muon of torch.optim as preconditioners.

The direction is the update at learning rate 1. Each optimizer runs on a copy of the parameters:
zeros before a step are minus the direction after it. Directions do not scale with the gradient, so
a GradScaler must unscale first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.options import EveryStepOptions, Options, momentum_problems
from ngsgd.preconditioners.states import Layout


@dataclass(frozen=True)
class AdamOptions(EveryStepOptions):
    """Options of Adam."""

    # eps: added to the root of second moments
    damping: float = 1e-8
    # beta 2: decay of second moments
    ema_decay: float = 0.999
    # beta 1: decay of the gradient average, in [0, 1)
    momentum: float = 0.9
    # Multiple of the parameter in the direction; for Adam, in the gradient.
    weight_decay: float = 0.0

    def problems(self) -> list[str]:
        return [*super().problems(), *moment_problems(self)]


def moment_problems(options: Any) -> list[str]:
    """Return one message for each invalid setting of momentum, weight_decay and layer_options."""
    found = momentum_problems(options.momentum)
    if options.weight_decay < 0.0:
        found.append(f"weight_decay is {options.weight_decay}; it must be at least 0.")
    if options.layer_options:
        found.append("layer_options is set; these methods have no settings of single layers.")
    return found


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

    Options: ClassVar[type[Options]] = AdamOptions
    joins_bias = False   # elementwise
    agrees_over_ranks = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        # by parameter, from its first step on
        self._copies: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        """Create the torch optimizer of one parameter, with learning rate 1."""
        own = self.options
        return torch.optim.Adam([copy], lr=1.0, betas=(own.momentum, own.ema_decay), eps=own.damping, weight_decay=own.weight_decay)

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self._shape(name)
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
            found[name] = self.parameter_direction(name, grads[name], self._parameters[name])
            self.weights[name] = 1.0
        return found

    def parameter_direction(self, name: str, g: Tensor, p: Tensor) -> Tensor:
        """Return the direction of one parameter and update its moments."""
        if name not in self._copies or self._copies[name].dtype != g.dtype or self._copies[name].device != g.device:
            self._copies[name] = nn.Parameter(torch.zeros_like(self.viewed(g)))
            self._optimizers[name] = self.optimizer(name, self._copies[name])
        copy = self._copies[name]
        # With weight decay start from the parameter, because decay is relative to it.
        before = torch.zeros_like(copy)
        if self.options.weight_decay:
            before = self.viewed(self.oriented(name, p)).to(copy)
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


@dataclass(frozen=True)
class AdamWOptions(AdamOptions):
    """Options of AdamW."""

    weight_decay: float = 0.01   # default of torch


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

    Options: ClassVar[type[Options]] = AdamWOptions

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        own = self.options
        return torch.optim.AdamW([copy], lr=1.0, betas=(own.momentum, own.ema_decay), eps=own.damping,
                                 weight_decay=own.weight_decay)


@dataclass(frozen=True)
class MuonOptions(AdamOptions):
    """Options of Muon."""

    # momentum of Muon, and beta 1 of AdamW for vectors
    momentum: float = 0.95
    # Newton-Schulz iterations
    orthogonal_steps: int = 5

    def problems(self) -> list[str]:
        return [*super().problems(), *orthogonal_problems(self)]


def orthogonal_problems(options: Any) -> list[str]:
    """Return a message if orthogonal_steps is invalid."""
    return [] if options.orthogonal_steps >= 1 else [f"orthogonal_steps is {options.orthogonal_steps}; give at least 1."]


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

    Options: ClassVar[type[Options]] = MuonOptions

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self._shape(name)
        return super().layout(name, entry) if len(shape) < 2 else {"statistics.momentum_buffer": self._sides(name)[::2]}

    def viewed(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1) if x.ndim > 1 else x.detach()

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        if copy.ndim < 2:
            return super().optimizer(name, copy)
        own = self.options
        return torch.optim.Muon([copy], lr=1.0, momentum=own.momentum, weight_decay=own.weight_decay, ns_steps=own.orthogonal_steps)
