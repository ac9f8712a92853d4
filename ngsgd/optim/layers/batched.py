"""Gradients of many affine layers, preconditioned in batches at the end of a backward pass.

On a GPU the launch of an operator costs more than the GEMM of a narrow layer. A layer therefore
only records its rows in its backward node. When autograd has finished, layers of equal shape are
processed by batched GEMMs. Results equal those of `KroneckerPreconditioner.gradient` up to the
order of sums.

A layer takes part if its rows are on a device and nothing reads its gradient before the end of the
backward pass. Parameter hooks and DistributedDataParallel do read it. `gradient` serves all others,
and the first minibatch, which initializes the estimates.

Letters: L layers, N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ngsgd.optim.layers.base import asked_for
from ngsgd.optim.layers.common import LayerContext, upcast, without_autocast
from ngsgd.optim.layers.kronecker import KroneckerPreconditioner
from ngsgd.preconditioners.estimate_group import EstimateGroup, GroupProjection

# Limit of waiting rows; at this size launches are cheap compared with the GEMMs.
_MOST_WAITING_BYTES = 1 << 28
# Number of cached groups of layers.
_MANY_GROUPS = 64


class Leaves(NamedTuple):
    """Parameters to whose `grad` the gradient of a layer is added."""

    weight: Tensor
    bias: Tensor | None


class _Rows(NamedTuple):
    """Recorded rows of a layer."""

    layer: KroneckerPreconditioner
    X_NI: Tensor
    dY_NO: Tensor
    leaves: Leaves
    # of the GEMM
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """Key of layers that can be processed together."""
        layer = self.layer
        return (self.X_NI.shape, self.dY_NO.shape, self.X_NI.dtype, self.dtype, self.X_NI.device,
                layer.has_bias, layer.input_side.rank, layer.output_side.rank)


class _Group(NamedTuple):
    """Layers of one shape, projected on both sides."""

    rows: Sequence[_Rows]
    sides: tuple[EstimateGroup, EstimateGroup]
    inputs: GroupProjection
    outputs: GroupProjection


def leaves_of(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Leaves | None:
    """Return the leaves of a layer that may take part.

    None if its node must compute the gradient.
    """
    if (x.is_cpu or not isinstance(layer, KroneckerPreconditioner) or torch.compiler.is_compiling()
            or DistributedDataParallel._active_ddp_module is not None):
        return None
    parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
    if any(not p.is_leaf or p._backward_hooks or p._post_accumulate_grad_hooks
           for p in parameters):
        return None
    return Leaves(weight, bias if bias is not None and bias.requires_grad else None)


def batches(ctx: Any) -> bool:
    """Return whether the layer of a backward node defers its gradient to the end of the pass."""
    if ctx.leaves is None or ctx.layer.context.batch is None \
            or not ctx.layer.context.batch.takes(ctx.layer):
        return False
    return ctx.leaves.bias is None or asked_for(ctx, 2)[1]


class BatchedPass:
    """Deferred gradients of the layers of one optimizer."""

    def __init__(self, context: LayerContext) -> None:
        self._context = context
        self._waiting: list[_Rows] = []
        # autograd task of the waiting layers
        self._task: int | None = None
        self._num_bytes = 0
        self._sides: dict[Any, tuple[EstimateGroup, EstimateGroup]] = {}
        self._constants: dict[Any, Tensor] = {}

    def takes(self, layer: KroneckerPreconditioner) -> bool:
        """Return whether the optimizer options allow it, and both estimates are initialized."""
        c = self._context
        return (c.on_nonfinite == "skip" and layer.input_side.has_begun
                and layer.output_side.has_begun
                and not (c.observes or c.ignore_zero_rows or c.sums_row_products or c.measures_cosine))

    def record(self, layer: KroneckerPreconditioner, X_NI: Tensor, dY_NO: Tensor,
               leaves: Leaves) -> None:
        """Record rows; called in the backward node of the layer."""
        layer.begin_pass(dY_NO, dY_NO.shape[0])
        task = torch._C._current_graph_task_id()
        if task != self._task:
            # Rows that remain belong to a pass that ended with an error.
            self._waiting, self._num_bytes, self._task = [], 0, task
            torch.autograd.Variable._execution_engine.queue_callback(self.run)
        num_bytes = 4 * (X_NI.numel() + dY_NO.numel())
        if (any(rows.layer is layer for rows in self._waiting)
                or self._num_bytes + num_bytes > _MOST_WAITING_BYTES):
            self.run()
        self._waiting.append(_Rows(layer, upcast(X_NI), upcast(dY_NO), leaves, X_NI.dtype))
        self._num_bytes += num_bytes

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients of all waiting layers to the `grad` of their parameters."""
        waiting, self._waiting, self._num_bytes = self._waiting, [], 0
        by_shape: dict[Any, list[_Rows]] = {}
        for rows in waiting:
            by_shape.setdefault(rows.shape, []).append(rows)
        if not waiting:
            return
        with without_autocast(waiting[0].X_NI.device.type):
            groups = [self._projected(rows) for rows in by_shape.values()]
            norms_23L = self._norms(groups)
            # Norm of [X | 1], then its product with the norm of the derivatives.
            inputs_2L = torch.hypot(norms_23L[:, 0], norms_23L[:, 1])
            products_2L = inputs_2L * norms_23L[:, 2]
            scale_L = torch.nan_to_num(products_2L[0] / products_2L[1], nan=1.0, posinf=1.0)
            loss_scale, first = self._context.loss_scale(), 0
            for group in groups:
                last = first + len(group.rows)
                self._add_gradients(group, scale_L[first:last])
                num_rows = float(group.inputs.X_LND.shape[1])
                group.sides[0].finish(group.inputs, inputs_2L[0, first:last], num_rows, 1.0)
                group.sides[1].finish(group.outputs, norms_23L[0, 2, first:last], num_rows,
                                      loss_scale)
                first = last

    def _projected(self, rows: Sequence[_Rows]) -> _Group:
        layers = tuple(one.layer for one in rows)
        # Not by the number of rows: the factors of a layer have one place in memory, which a CUDA
        # graph may read.
        key = tuple(layer.number for layer in layers)
        if key not in self._sides:
            if len(self._sides) >= _MANY_GROUPS:
                self._sides.clear()
            self._sides[key] = (EstimateGroup([layer.input_side for layer in layers]),
                                EstimateGroup([layer.output_side for layer in layers]))
        sides = self._sides[key]
        X_LNI = _stacked([one.X_NI for one in rows])
        one = self._constant(X_LNI, 1.0) if layers[0].has_bias else None
        outputs = sides[1].project(_stacked([row.dY_NO for row in rows]), None)
        return _Group(rows, sides, sides[0].project(X_LNI, one), outputs)

    def _norms(self, groups: Sequence[_Group]) -> Tensor:
        """Return Frobenius norms of X, the appended column and dY of each layer, before and after.
        """
        lists: list[list[Tensor]] = [[], [], [], []]
        for group in groups:
            inputs, outputs = group.inputs, group.outputs
            for parts, rows in zip(lists, (inputs.X_LND, outputs.X_LND, inputs.Xhat_LND,
                                           outputs.Xhat_LND), strict=True):
                parts.extend(rows.unbind())
        appended = [group.inputs.one_hat_LN1 for group in groups]
        hats = [one for stacked in appended if stacked is not None for one in stacked.unbind()]
        norms = list(torch._foreach_norm([part for parts in lists for part in parts] + hats))
        num_layers = len(lists[0])
        X_L, dY_L, Xhat_L, dYhat_L = (norms[i * num_layers:(i + 1) * num_layers] for i in range(4))
        of_hats = iter(norms[4 * num_layers:])
        one_L, one_hat_L = [], []
        for group in groups:
            has_one, num_rows = group.inputs.one_hat_LN1 is not None, group.inputs.X_LND.shape[1]
            one = self._constant(X_L[0], num_rows**0.5 if has_one else 0.0)
            one_L += [one] * len(group.rows)
            one_hat_L += [next(of_hats) if has_one else one for _ in group.rows]
        return torch.stack([*X_L, *one_L, *dY_L, *Xhat_L, *one_hat_L, *dYhat_L]).view(
            2, 3, num_layers)

    def _add_gradients(self, group: _Group, scale_L: Tensor) -> None:
        dYhat_LNO = group.outputs.Xhat_LND.mul_(scale_L[:, None, None])
        dtype = group.rows[0].dtype
        dYhat_LON, Xhat_LNI = dYhat_LNO.to(dtype).mT, group.inputs.Xhat_LND.to(dtype)
        _add([rows.leaves.weight for rows in group.rows], torch.bmm(dYhat_LON, Xhat_LNI))
        one_hat_LN1 = group.inputs.one_hat_LN1
        biases = [rows.leaves.bias for rows in group.rows]
        if one_hat_LN1 is not None and any(bias is not None for bias in biases):
            _add(biases, torch.bmm(dYhat_LNO.mT, one_hat_LN1))

    def _constant(self, like: Tensor, value: float) -> Tensor:
        """Return a 0-d tensor on the device."""
        key = (value, like.dtype, like.device)
        if key not in self._constants:
            self._constants[key] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self._constants[key]


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))


def _add(parameters: Sequence[Tensor | None], gradients: Tensor) -> None:
    """Set or add to the `grad` of each parameter."""
    for p, gradient in zip(parameters, gradients.unbind(), strict=True):
        if p is None:
            continue
        own = gradient.reshape(p.shape).to(p.dtype)
        if p.grad is None:
            p.grad = own
        else:
            p.grad.add_(own)
