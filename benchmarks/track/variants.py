"""Candidates for a better natural gradient: one optimizer with an ingredient per option.

For each weight matrix:

    g = gradient of rows that the estimates precondition (`rows`), or the plain gradient
    m <- momentum m + g;   u = g + momentum m
    u <- u, or (1 - Wo^T Wo) u (1 - Wi^T Wi), with the estimates of the sides in `estimates`
    u <- u / sqrt(mean of u^2 over minibatches)                      if second_moments
    u <- u with length 0.2 sqrt(O I), or its rows, or orthogonalized  (`length`)
    W <- (1 - lr weight_decay) W - lr u

AdamW trains the other parameters.

`RootNatural` takes the square roots of complete Fisher factors, without Newton-Schulz:

    u <- (B + d)^(-power) u (A + d)^(-power),  A = mean of a a^T, B = mean of e e^T, mean eigenvalue 1

with rows of length 0.2 sqrt(I). Adam trains biases.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd import NaturalMuon
from ngsgd.ops.linalg import eigh
from ngsgd.ops.orthonormal import orthogonalized
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.layers import FisherSettings, LayerContext, LayerPreconditioner
from ngsgd.optim.layers.batched import BatchedPass
from ngsgd.optim.layers.kronecker import preconditioned
from ngsgd.optim.natural_gradient import NaturalGradient, layer_of
from ngsgd.optim.natural_muon import OrthogonalMomentum
from ngsgd.optim.optimizer import Optimizer

_RMS = 0.2
# of a side that is not used: without data, it changes nothing
_NO_ESTIMATE = OnlineNaturalGradient(1)


class Variant(NaturalMuon):
    """See the module; options have the names of the formulas."""

    def __init__(self, model: nn.Module, *, rows: bool = False, estimates: str = "both", length: str = "matrix",
                 second_moments: float = 0.0, momentum: float = 0.8) -> None:
        context, preconditioners = LayerContext(observes=not rows), dict[str, LayerPreconditioner]()
        context.batch = BatchedPass(context)
        momenta = _Momentum(5, context, preconditioners)
        momenta.estimates, momenta.length, momenta.second_moments = estimates, length, second_moments
        momenta.layers = preconditioners
        rule = NaturalGradient(momenta, context, preconditioners, settings={**asdict(FisherSettings()), "alpha": 1.0},
                               fallback="adamw", is_mean=False)
        Optimizer.__init__(self, model, rule, {"lr": 1.0, "momentum": momentum, "max_change": 0.0, "weight_decay": 0.01,
                                               "adamw_lr_factor": 1.0},
                           layer_options=None, max_param_change=0.0, on_nonfinite="skip")


class _Momentum(OrthogonalMomentum):
    estimates: str
    length: str
    second_moments: float
    layers: dict[str, LayerPreconditioner]

    def direction(self, group: dict[str, Any], p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if state.get("velocity") is None:
            state["velocity"] = torch.zeros_like(p)
        velocity = state["velocity"].mul_(group["momentum"]).add_(gradient)
        u_OI = torch.add(gradient, velocity, alpha=group["momentum"]).flatten(1)
        layer = self.layers.get(layer_of(group))
        if layer is not None and layer.weight is p and self.estimates != "none":
            outputs, inputs = (layer.sides[side] if self.estimates in ("both", side) else _NO_ESTIMATE
                               for side in ("output", "input"))
            u_OI = preconditioned(u_OI, outputs, inputs)
        if self.second_moments:
            squares = state.setdefault("squares", torch.zeros_like(u_OI))
            squares.lerp_(u_OI.square(), 1.0 - self.second_moments)
            u_OI = u_OI / squares.sqrt().add_(1e-12)
        num_outputs, num_inputs = u_OI.shape
        if self.length == "orthogonal":
            u_OI = orthogonalized(u_OI, self.num_iterations).mul_(_RMS * math.sqrt(max(num_outputs, num_inputs)))
        elif self.length == "row":
            u_OI = u_OI * (_RMS * math.sqrt(num_inputs) / (u_OI.norm(dim=1, keepdim=True) + 1e-20))
        elif self.length == "matrix":
            u_OI = u_OI * (_RMS * math.sqrt(num_outputs * num_inputs) / (u_OI.norm() + 1e-20))
        return u_OI


class RootNatural:
    """See the module; A and B are measured every 4 minibatches.

    The roots are computed after 1, 2, 4 .. minibatches and at every multiple of `interval`.
    """

    _MEASURE_PERIOD = 4

    def __init__(self, model: nn.Module, *, power: float = 0.5, momentum: float = 0.9, damping: float = 0.3, decay: float = 0.96,
                 interval: int = 48) -> None:
        self.power, self.momentum, self.damping, self.decay, self.interval = power, momentum, damping, decay, interval
        self.layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.biases = torch.optim.Adam([layer.bias for layer in self.layers], betas=(0.9, 0.99))
        self.param_groups = self.biases.param_groups
        self.num_steps = 0
        self.factors: list[dict[str, Tensor]] = [{} for _ in self.layers]
        self.roots: list[dict[str, Tensor]] = [{} for _ in self.layers]
        self.velocities = [torch.zeros_like(layer.weight) for layer in self.layers]
        for layer, factors in zip(self.layers, self.factors, strict=True):
            layer.register_forward_hook(self._measuring(factors))

    def _measuring(self, factors: dict[str, Tensor]) -> Any:
        def measure(key: str, x_XD: Tensor) -> None:
            product_DD = x_XD.T @ x_XD / len(x_XD)
            factors[key] = product_DD if key not in factors else factors[key].lerp_(product_DD, 1.0 - self.decay)

        def seen(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if torch.is_grad_enabled() and self.num_steps % self._MEASURE_PERIOD == 0:
                measure("A", inputs[0].detach())
                output.register_hook(lambda e_XO: measure("B", e_XO))
        return seen

    def zero_grad(self, *, set_to_none: bool) -> None:
        for layer in self.layers:
            layer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, num_samples: int) -> None:
        lr = self.param_groups[0]["lr"]
        self.num_steps += 1
        begins = self.num_steps < self.interval and self.num_steps.bit_count() == 1
        for layer, factors, roots, velocity in zip(self.layers, self.factors, self.roots, self.velocities, strict=True):
            if begins or self.num_steps % self.interval == 0:
                roots.update({key: self._root(factor_DD) for key, factor_DD in factors.items()})
            assert layer.weight.grad is not None
            velocity.mul_(self.momentum).add_(layer.weight.grad)
            u_OI = roots["B"] @ torch.add(layer.weight.grad, velocity, alpha=self.momentum) @ roots["A"]
            u_OI *= _RMS * math.sqrt(u_OI.shape[1]) / (u_OI.norm(dim=1, keepdim=True) + 1e-20)
            layer.weight.sub_(u_OI, alpha=lr)
        self.biases.step()

    def _root(self, factor_DD: Tensor) -> Tensor:
        values_D, U_DD = eigh(factor_DD)
        mean = values_D.mean()
        if not mean > 0.0:
            # the gradients of the first minibatch below an output layer of zeros
            return torch.eye(len(factor_DD))
        return U_DD * (values_D.clamp(min=0.0) / mean + self.damping).pow(-self.power) @ U_DD.T
