"""Approximate hypergradients of NG-SGD, with a constant preconditioner in the derivative.

The direction of a linear layer is s (I - Wo^T Wo) G (I - Wi^T Wi). G is the plain gradient of
[weight | bias], Wi and Wo are the low-rank Fisher factors of its inputs and output derivatives
before the minibatch, and s is the product of the two scales. The derivative ignores the dependence
of Wi, Wo and s on the weights, because their updates are not reversible (an eigenvalue truncation).
The derivative of a direction is then the same product with the Hessian. Signs and directions are
correct, magnitudes are off by up to a third: docs/tuning.md.

Letters: N rows, I inputs, O outputs, R rank, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig
from ngsgd.errors import ConfigError
from ngsgd.hypergrad.job_replay import Linearized
from ngsgd.hypergrad.training_task import Flat, MinibatchIndex, ModuleTask
from ngsgd.ops.second_derivatives import twice_differentiable
from ngsgd.preconditioners.online import OnlineNaturalGradient, PreconditionContext


@dataclass(frozen=True)
class Factors:
    """Preconditioner of one layer at one minibatch."""

    # None: rows are unchanged
    in_RI: Tensor | None
    out_RO: Tensor | None
    scale: float
    has_bias: bool

    def apply(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Apply it to [weight, bias] or [weight], or to any vector of their shapes.

        The map is symmetric.
        """
        Z_OI = torch.cat([parts[0], parts[1][:, None]], dim=1) if self.has_bias else parts[0]
        if self.in_RI is not None:
            W_RI = self.in_RI.to(Z_OI.dtype)
            Z_OI = Z_OI - (Z_OI @ W_RI.T) @ W_RI
        if self.out_RO is not None:
            W_RO = self.out_RO.to(Z_OI.dtype)
            Z_OI = Z_OI - W_RO.T @ (W_RO @ Z_OI)
        Z_OI = Z_OI * self.scale
        return [Z_OI[:, :-1], Z_OI[:, -1]] if self.has_bias else [Z_OI]


class NaturalGradients:
    """Directions of NG-SGD for `hypergradient(..., gradients=...)`.

    Each job starts with new estimates.
    """

    label = "constant"
    is_exact = False
    can_reverse = False

    def __init__(self, task: ModuleTask, flat: Flat, settings: Mapping[str, Any], ranks: tuple[int, int]) -> None:
        self.task, self.flat, self._settings, self._ranks = task, flat, dict(settings), ranks
        self._modules = linear_layers(task, flat)
        self._estimates: dict[str, tuple[OnlineNaturalGradient, OnlineNaturalGradient]] = {}

    def probe(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> bool:
        """Return True; nothing is reversed, so bitwise reproducibility is unnecessary."""
        return True

    def begin(self) -> None:
        self._estimates = {name: (OnlineNaturalGradient(self._ranks[0], relative_floor=True, **self._settings),
                                  OnlineNaturalGradient(self._ranks[1], relative_floor=True, **self._settings))
                           for name in self._modules}

    def snapshot(self) -> Any:
        return {name: tuple(one.state_dict() for one in pair) for name, pair in self._estimates.items()}

    def restore(self, snapshot: Any) -> None:
        for name, pair in self._estimates.items():
            for one, state in zip(pair, snapshot[name], strict=True):
                one.load_state_dict(state)

    def get_state(self) -> Any:
        return None

    def set_state(self, state: Any) -> None:
        pass

    def forward(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        return self._direction(w_P, place, data_weights, create_graph=False)[0]

    def reverse(self, w_P: Tensor, place: MinibatchIndex,
                data_weights: Tensor | None) -> Linearized:
        weights = None if data_weights is None else data_weights.detach().requires_grad_()
        direction_P, factors, graph_P, leaves = self._direction(w_P.clone(), place, weights, create_graph=True)
        return _ConstantPreconditioner(direction_P, factors, graph_P, leaves if weights is None else [*leaves, weights], self)

    def applied(self, factors: Mapping[str, Factors], vector_P: Tensor) -> Tensor:
        """Multiply a vector by the preconditioner of a minibatch."""
        parts = dict(zip(self.flat.names, self.flat.unflatten(vector_P), strict=True))
        for name, names in self._modules.items():
            parts |= zip(names, factors[name].apply([parts[one] for one in names]), strict=True)
        return self.flat.flatten([parts[name] for name in self.flat.names])

    def _direction(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None, *,
                   create_graph: bool) -> tuple[Tensor, dict[str, Factors], Tensor, list[Tensor]]:
        """Return (direction, preconditioner, plain gradient, its leaves); updates the estimates."""
        leaves = [part.detach().requires_grad_() for part in self.flat.unflatten(w_P)]
        torch.default_generator.manual_seed(place.seed(self.task.seed))
        with captured(self.task.module, self._modules) as rows, twice_differentiable():
            loss = self.task.loss(dict(zip(self.flat.names, leaves, strict=True)), place, data_weights)
        outputs = [rows[name][1] for name in self._modules]
        found = torch.autograd.grad(loss, [*leaves, *outputs], create_graph=create_graph, allow_unused=True)
        graph_P = self.flat.flatten([p * 0.0 if one is None else one for one, p in zip(found, leaves, strict=False)])
        factors = {name: self._precondition(name, rows[name][0], dY) for name, dY in
                   zip(self._modules, found[len(leaves):], strict=True)}
        plain_P = graph_P.detach()
        return self.applied(factors, plain_P), factors, graph_P, leaves

    @torch.no_grad()
    def _precondition(self, name: str, x: Tensor, dY: Tensor) -> Factors:
        X_NI, dY_NO = x.detach().reshape(-1, x.shape[-1]), dY.detach().reshape(-1, dY.shape[-1])
        inputs, outputs = self._estimates[name]
        has_bias = len(self._modules[name]) > 1
        in_RI, in_scale = _met(inputs, X_NI, X_NI.new_ones(len(X_NI)) if has_bias else None)
        out_RO, out_scale = _met(outputs, dY_NO, None)
        return Factors(in_RI, out_RO, in_scale * out_scale, has_bias)


@dataclass
class _ConstantPreconditioner:
    """Derivative of P G with constant P."""

    direction_P: Tensor
    factors: Mapping[str, Factors]
    graph_P: Tensor
    leaves: list[Tensor]
    owner: NaturalGradients

    def products(self, z_P: Tensor) -> tuple[Tensor, Tensor | None]:
        flat = self.owner.flat
        Pz_P = self.owner.applied(self.factors, z_P)
        found = torch.autograd.grad(self.graph_P, self.leaves, grad_outputs=Pz_P.to(self.graph_P.dtype), allow_unused=True)
        whole = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, self.leaves, strict=True)]
        num = len(flat.names)
        return flat.flatten(whole[:num]).double(), whole[num].double() if len(whole) > num else None


def natural_gradients(task: ModuleTask, config: OptimizerConfig) -> NaturalGradients:
    """Create the directions of a run with `config`.

    Raises ConfigError for unsupported layers and settings.
    """
    if config.backstitch_scale or config.max_change_per_sample:
        raise ConfigError("ngsgd tune does not support backstitch_scale and max_change_per_sample; "
                          "set both to 0 in optimizer.")
    settings = {"update_period": config.update_period, "num_samples_history": config.num_samples_history, "alpha": config.alpha,
                "schedule": config.update_schedule}
    return NaturalGradients(task, Flat.of(task), settings, (config.rank_in, config.rank_out))


def _met(estimate: OnlineNaturalGradient, X_ND: Tensor, one_N: Tensor | None) -> tuple[Tensor | None, float]:
    """Return (W of the projection, scale), then update the estimate."""
    call: PreconditionContext | None = estimate.begin(X_ND, one_N)
    if call is None:
        return None, 1.0
    scale = call.preconditioned().scale
    W_RD = call.W_RD.clone()
    estimate.finish(call)
    return W_RD, float(scale)


def linear_layers(task: ModuleTask, flat: Flat) -> dict[str, list[str]]:
    """Map module paths to the names of weight and bias."""
    found: dict[str, list[str]] = {}
    for name, module in task.module.named_modules():
        own = [f"{name}.{part}" if name else part for part, p in module.named_parameters(recurse=False) if p.requires_grad]
        if not own:
            continue
        in_order = own == [part for part in flat.names if part in own] and own[0].endswith("weight")
        if not isinstance(module, nn.Linear) or not in_order:
            raise ConfigError("hypergradients of NG-SGD support linear layers only, and "
                              f"{name or type(module).__name__} is a {type(module).__name__}; tune "
                              "with optimizer=sgd.")
        found[name] = own
    return found


@contextmanager
def captured(module: nn.Module, names: Mapping[str, Sequence[str]]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record input and output of each layer during calls inside the context."""
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    modules = dict(module.named_modules())

    def hook_of(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows[name] = (inputs[0], output)
        return hook
    handles = [modules[name].register_forward_hook(hook_of(name)) for name in names]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
