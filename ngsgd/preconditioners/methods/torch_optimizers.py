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

from ngsgd.curvature.layers import upcast
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.options import EveryStepOptions


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
        found = super().problems()
        if not 0.0 <= self.momentum < 1.0:
            found.append(f"momentum is {self.momentum}; it must be at least 0 and below 1.")
        if self.weight_decay < 0.0:
            found.append(f"weight_decay is {self.weight_decay}; it must be at least 0.")
        if self.layer_options:
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

    Options = AdamOptions
    joins_bias = False   # elementwise
    agrees_over_ranks = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        shown = {name: self.viewed(self.oriented(name, p)) for name, p in model.named_parameters()
                 if p.requires_grad and name not in self._skipped}
        self._copies = {name: nn.Parameter(torch.zeros_like(upcast(x)))
                        for name, x in shown.items()}
        self._optimizers = {name: self.optimizer(name, copy) for name, copy in self._copies.items()}

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        """Create the torch optimizer of one parameter, with learning rate 1."""
        own = self.options
        return torch.optim.Adam([copy], lr=1.0, betas=(own.momentum, own.ema_decay), eps=own.damping, weight_decay=own.weight_decay)

    def viewed(self, x: Tensor) -> Tensor:
        """Return the shape in which the torch optimizer gets a parameter."""
        return x.detach()

    def update_curvature(self, seen: Any) -> None:
        """Do nothing; `apply` updates the moments."""

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        found = {}
        for name, g in grads.items():
            if not bool(g.isfinite().all()):
                self.note_skipped()
                found[name] = g
                continue
            copy = self._copies[name]
            # With weight decay start from the parameter, because decay is relative to it.
            before = torch.zeros_like(copy)
            if self.options.weight_decay:
                before = self.viewed(self.oriented(name, parameters[name])).to(copy)
            copy.copy_(before)
            copy.grad = self.viewed(g).to(copy)
            self._optimizers[name].state[copy] = self.statistics.setdefault(name, {})
            with torch.enable_grad():
                self._optimizers[name].step()
            copy.grad = None
            self.weights[name] = 1.0
            found[name] = (before - copy.detach()).view_as(g)
        return found

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

    Options: ClassVar[type[AdamOptions]] = AdamWOptions

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
        found = super().problems()
        return found if self.orthogonal_steps >= 1 else [*found, f"orthogonal_steps is {self.orthogonal_steps}; give at least 1."]


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

    Options = MuonOptions

    def viewed(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1) if x.ndim > 1 else x.detach()

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        if copy.ndim < 2:
            return super().optimizer(name, copy)
        own = self.options
        return torch.optim.Muon([copy], lr=1.0, momentum=own.momentum, weight_decay=own.weight_decay, ns_steps=own.orthogonal_steps)
