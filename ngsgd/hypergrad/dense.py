"""Momentum with a K-FAC-style preconditioner whose factors are undone too, and the derivative through it.

A linear layer's direction is (S + c I)^-1 G (A + c I)^-1 with A and S moving averages of X^T X / N and N Y^T Y: X its input rows
(with a 1 for the bias), Y the derivatives of the loss by its outputs.  A moving average is the same recurrence as momentum, so
`ExactMomentum` undoes it with log2(1/decay) bits per entry and step: the statistics are computed anew at the restored weights.

Letters: N rows, I inputs, O outputs, F entries of all factors, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.hypergrad.exact_momentum import ExactMomentum
from ngsgd.hypergrad.job_replay import Linearized
from ngsgd.hypergrad.natural import captured, linear_layers
from ngsgd.hypergrad.training_task import Flat, MinibatchIndex, ModuleTask
from ngsgd.ops.second_derivatives import twice_differentiable


class DenseGradients:
    """Directions for `hypergradient(..., gradients=...)`; each job begins with factors of 0, corrected for that.

    Args:
        decay: of the moving averages, per minibatch; above 0 and below 1.
        damping: c above, on both factors.
        through: differentiates the preconditioner too, which makes the hypergradient exact; without, it is held constant, as
            it must be for NG-SGD, and the hypergradient is approximate.
    """

    can_reverse = True

    def __init__(self, task: ModuleTask, flat: Flat, *, decay: float = 0.95, damping: float = 0.1, through: bool = True) -> None:
        if not (0.0 < decay < 1.0 and damping > 0.0):
            raise ValueError(f"Invalid decay or damping: {decay}, {damping}; decay must be above 0 and below 1, damping above 0")
        self.task, self.flat, self.decay, self.damping, self.through = task, flat, decay, damping, through
        self.label, self.is_exact = ("exact", True) if through else ("constant", False)
        self._modules = linear_layers(task, flat)
        self._sizes = [size for names in self._modules.values() for size in self._dims(names)]
        self._state = self._fresh()
        self._is_before = False  # the state is that from before the step to be differentiated, and not from after it
        self._d_factors_F = torch.zeros(0)

    def probe(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> bool:
        """Digests find out."""
        return True

    def begin(self) -> None:
        self._state, self._is_before = self._fresh(), False

    def snapshot(self) -> Any:
        return self._state.copy()

    def restore(self, snapshot: Any) -> None:
        self._state, self._is_before = snapshot.copy(), True

    def get_state(self) -> Any:
        return self._state

    def set_state(self, state: Any) -> None:
        self._state, self._is_before = state, False
        self._d_factors_F = torch.zeros_like(state.u_P, dtype=torch.float64)

    def forward(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        grads, statistics, _ = self._minibatch(w_P, place, data_weights, create_graph=False)
        self._state.step_v(-_flat(statistics).detach(), [self.decay] * len(self._state.groups))
        return self._applied(self._state.velocity(), self._state.num_steps, grads).to(w_P.dtype)

    def reverse(self, w_P: Tensor, place: MinibatchIndex,
                data_weights: Tensor | None) -> Linearized:
        weights = None if data_weights is None else data_weights.detach().requires_grad_()
        grads, statistics, leaves = self._minibatch(w_P.clone(), place, weights, create_graph=True)
        impulse_F, num_steps = -_flat(statistics).detach(), self._state.num_steps + self._is_before
        if self._is_before:
            self._state.step_v(impulse_F, [self.decay] * len(self._state.groups))
        after_F = self._state.velocity()
        direction_P = self._applied(after_F, num_steps, [grad.detach() for grad in grads]).to(w_P.dtype)
        if not self._is_before:
            self._state.undo_v(impulse_F)
        # the value is that from after the step, to the bit; the derivative is the recurrence's
        before_F = ((after_F - (1.0 - self.decay) * _flat(statistics).detach().double()) / self.decay).requires_grad_()
        graph_F = self.decay * before_F + (1.0 - self.decay) * _flat(statistics).double()
        used_F = graph_F if self.through else after_F
        graph_P = self._applied(used_F, num_steps, grads)
        return _Through(direction_P, graph_P, graph_F, before_F, leaves if weights is None else [*leaves, weights], self)

    def _minibatch(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None, *,
                   create_graph: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(plain gradients, statistics A and S of every layer, leaves)."""
        leaves = [part.detach().requires_grad_() for part in self.flat.unflatten(w_P)]
        torch.default_generator.manual_seed(place.seed(self.task.seed))
        with captured(self.task.module, self._modules) as rows, twice_differentiable():
            loss = self.task.loss(dict(zip(self.flat.names, leaves, strict=True)), place, data_weights)
        found = torch.autograd.grad(loss, [*leaves, *(rows[name][1] for name in self._modules)], create_graph=create_graph)
        statistics = []
        for name, Y_NO in zip(self._modules, found[len(leaves):], strict=True):
            X_NI = rows[name][0]
            if len(self._modules[name]) > 1:
                X_NI = torch.cat([X_NI, X_NI.new_ones(len(X_NI), 1)], dim=1)
            statistics += [X_NI.T @ X_NI / len(X_NI), Y_NO.T @ Y_NO * len(Y_NO)]
        return list(found[:len(leaves)]), statistics, leaves

    def _applied(self, factors_F: Tensor, num_steps: int, grads: Sequence[Tensor]) -> Tensor:
        """The direction, float64, P."""
        parts = dict(zip(self.flat.names, grads, strict=True))
        corrected = (factors_F / (1.0 - self.decay ** num_steps)).split([size * size for size in self._sizes])
        for index, names in enumerate(self._modules.values()):
            A_II, S_OO = (self._damped(corrected[2 * index + side], self._sizes[2 * index + side]) for side in (0, 1))
            has_bias = len(names) > 1
            G_OI = torch.cat([parts[names[0]], parts[names[1]][:, None]], dim=1) if has_bias else parts[names[0]]
            D_OI = torch.linalg.solve(A_II, torch.linalg.solve(S_OO, G_OI.double()).T).T
            parts |= {names[0]: D_OI[:, :-1], names[1]: D_OI[:, -1]} if has_bias else {names[0]: D_OI}
        return self.flat.flatten([parts[name].double() for name in self.flat.names])

    def _damped(self, entries: Tensor, size: int) -> Tensor:
        return entries.view(size, size) + self.damping * torch.eye(size, dtype=torch.float64)

    def _dims(self, names: Sequence[str]) -> tuple[int, int]:
        num_outputs, num_inputs = self.task.start[names[0]].shape
        return num_inputs + (len(names) > 1), num_outputs

    def _fresh(self) -> ExactMomentum:
        groups, first = [], 0
        for size in self._sizes:
            groups.append(slice(first, first := first + size * size))
        dtype = next(iter(self.task.start.values())).dtype
        return ExactMomentum(torch.zeros(first, dtype=dtype), groups)


@dataclass
class _Through:
    """The derivative of a direction by weights and by the factors before the step, whose own derivative is carried along."""

    direction_P: Tensor
    graph_P: Tensor
    graph_F: Tensor
    before_F: Tensor
    leaves: list[Tensor]
    owner: DenseGradients

    def products(self, z_P: Tensor) -> tuple[Tensor, Tensor | None]:
        owner, num = self.owner, len(self.owner.flat.names)
        outputs, vectors, inputs = [self.graph_P], [z_P.to(self.graph_P.dtype)], list(self.leaves)
        if owner.through:  # signs: what comes back is subtracted from the derivative by the weights
            outputs, vectors, inputs = [*outputs, self.graph_F], [*vectors, -owner._d_factors_F], [*inputs, self.before_F]
        found = torch.autograd.grad(outputs, inputs, grad_outputs=vectors, allow_unused=True)
        whole = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, inputs, strict=True)]
        if owner.through:
            owner._d_factors_F = -whole.pop().double()
        return owner.flat.flatten(whole[:num]).double(), whole[num].double() if len(whole) > num else None


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
