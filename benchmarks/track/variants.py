"""Candidates for a better natural gradient: one optimizer with an ingredient per option.

For each weight matrix:

    g = gradient of rows that the estimates precondition (`rows`), or the plain gradient
    m <- momentum m + g;   u = g + momentum m
    u <- u, or (1 - Wo^T Wo) u (1 - Wi^T Wi), with the estimates of the sides in `estimates`
    u <- u / sqrt(mean of u^2 over minibatches)                      if second_moments
    u <- u with length 0.2 sqrt(O I), or its rows, or orthogonalized  (`length`)
    W <- (1 - lr weight_decay) W - lr u

AdamW trains the other parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd import NaturalMuon
from ngsgd.ops.newton_schulz import orthogonalized
from ngsgd.optim.natural_muon import _name_of_layer, _without_large_directions
from ngsgd.preconditioners.online import OnlineNaturalGradient

_RMS = 0.2
# of a side that is not used: without data, it changes nothing
_NO_ESTIMATE = OnlineNaturalGradient(1)


class Variant(NaturalMuon):
    """See the module; options have the names of the formulas."""

    def __init__(self, model: nn.Module, lr: float = 1.0, *, rows: bool = False, estimates: str = "both", length: str = "matrix",
                 second_moments: float = 0.0, **options: Any) -> None:
        self.rows, self.estimates, self.length = rows, estimates, length
        self.second_moments = second_moments
        super().__init__(model, lr, **options)

    def _attach(self, model: nn.Module) -> None:
        self._context.observes = not self.rows
        super(NaturalMuon, self)._attach(model)

    def _direction(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[p]
        if state.get("velocity") is None:
            state["velocity"] = torch.zeros_like(p)
        velocity = state["velocity"].mul_(group["momentum"]).add_(gradient)
        u_OI = torch.add(gradient, velocity, alpha=group["momentum"]).flatten(1)
        layer = self._preconditioners.get(_name_of_layer(group))
        if layer is not None and layer.weight is p and self.estimates != "none":
            outputs, inputs = (layer.sides[side] if self.estimates in ("both", side) else _NO_ESTIMATE
                               for side in ("output", "input"))
            u_OI = _without_large_directions(u_OI, outputs, inputs)
        if self.second_moments:
            squares = state.setdefault("squares", torch.zeros_like(u_OI))
            squares.lerp_(u_OI.square(), 1.0 - self.second_moments)
            u_OI = u_OI / squares.sqrt().add_(1e-12)
        num_outputs, num_inputs = u_OI.shape
        if self.length == "orthogonal":
            u_OI = orthogonalized(u_OI, self.ns_steps).mul_(_RMS * math.sqrt(max(num_outputs, num_inputs)))
        elif self.length == "row":
            u_OI = u_OI * (_RMS * math.sqrt(num_inputs) / (u_OI.norm(dim=1, keepdim=True) + 1e-20))
        elif self.length == "matrix":
            u_OI = u_OI * (_RMS * math.sqrt(num_outputs * num_inputs) / (u_OI.norm() + 1e-20))
        return u_OI
