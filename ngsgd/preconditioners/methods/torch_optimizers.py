"""Adam, AdamW and Muon of torch.optim behind the protocol: the direction is what they would subtract at a learning rate of 1.

Each runs on a copy: parameters that are zero before a step are minus the direction after it.  Their directions do not grow with the
gradient, so a GradScaler has to unscale first.
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
    """Of Adam."""

    # eps: added to the root of second moments
    damping: float = 1e-8
    # beta 2: of second moments
    ema_decay: float = 0.999
    # beta 1: of the gradient; 0 to below 1
    momentum: float = 0.9
    # share of the parameter in the direction; Adam: of the gradient
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
    """torch.optim.Adam (Kingma and Ba 2015)."""

    Options = AdamOptions
    joins_bias = False   # element by element
    agrees_over_ranks = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        shown = {name: self.viewed(self.oriented(name, p)) for name, p in model.named_parameters()
                 if p.requires_grad and name not in self._skipped}
        self._copies = {name: nn.Parameter(torch.zeros_like(upcast(x)))
                        for name, x in shown.items()}
        self._optimizers = {name: self.optimizer(name, copy) for name, copy in self._copies.items()}

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        """torch's, of one parameter and for a learning rate of 1."""
        own = self.options
        return torch.optim.Adam([copy], lr=1.0, betas=(own.momentum, own.ema_decay), eps=own.damping, weight_decay=own.weight_decay)

    def viewed(self, x: Tensor) -> Tensor:
        """The shape in which torch's optimiser gets a parameter."""
        return x.detach()

    def update_curvature(self, seen: Any) -> None:
        """Nothing: `apply` moves the moments, too."""

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        found = {}
        for name, g in grads.items():
            if not bool(g.isfinite().all()):
                self.num_skipped += 1
                found[name] = g
                continue
            copy = self._copies[name]
            # the parameter itself where it has a share in the direction: decay is relative to it
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
        """Nothing: the moments are what is applied."""


@dataclass(frozen=True)
class AdamWOptions(AdamOptions):
    """Of AdamW."""

    weight_decay: float = 0.01   # as torch's


class AdamW(Adam):
    """torch.optim.AdamW (Loshchilov and Hutter 2019)."""

    Options: ClassVar[type[AdamOptions]] = AdamWOptions

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        own = self.options
        return torch.optim.AdamW([copy], lr=1.0, betas=(own.momentum, own.ema_decay), eps=own.damping,
                                 weight_decay=own.weight_decay)


@dataclass(frozen=True)
class MuonOptions(AdamOptions):
    """Of Muon."""

    # of Muon; of AdamW, for vectors, too
    momentum: float = 0.95
    # of the Newton-Schulz iteration
    orthogonal_steps: int = 5

    def problems(self) -> list[str]:
        found = super().problems()
        return found if self.orthogonal_steps >= 1 else [*found, f"orthogonal_steps is {self.orthogonal_steps}; give at least 1."]


class Muon(AdamW):
    """torch.optim.Muon (Jordan et al. 2024) for matrices, dimensions behind the first taken together; AdamW for vectors."""

    Options = MuonOptions

    def viewed(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1) if x.ndim > 1 else x.detach()

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        if copy.ndim < 2:
            return super().optimizer(name, copy)
        own = self.options
        return torch.optim.Muon([copy], lr=1.0, momentum=own.momentum, weight_decay=own.weight_decay, ns_steps=own.orthogonal_steps)
