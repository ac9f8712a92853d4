"""Natural gradient with the rows of all ranks of DistributedDataParallel.

A rank sees its own rows alone. Its backward pass therefore adds the plain gradient, which
DistributedDataParallel averages, and keeps moments of the rows. At the begin of a step the ranks
sum the moments, precondition the averaged gradient, and update their equal estimates. A step is
that of one process with the rows of all ranks, up to rounding, and replicas compute the same.

Preconditioned rows are X - (X L^T) V, with the factors L and V of an estimate. Their gradient is
that of P = dY^T X: P - (P L^T) V for the input side, then P - V^T (L P) for the output side.
Letters: N rows, D columns, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngsgd.errors import DivergenceError
from ngsgd.ops import fisher_projection
from ngsgd.ops import natural_gradient as ops
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.fisher.stack import Number
from ngsgd.optim.layers.common import LayerContext, LayerPreconditioner, Ranks, upcast

# rows of a pass with their appended column
_Rows = tuple[Tensor, Tensor | None]


@dataclass(eq=False)
class _Moments:
    """Moments of the rows of one side since the last step, of this rank or of all."""

    sum_sq: Number = 0.0
    # of the preconditioned rows, before rescaling
    sum_sq_hat: Number = 0.0
    num_rows: Number = 0.0
    # H^T X, if an update is due
    J_RD: Tensor | None = None
    # rows that the step needs again
    rows: list[_Rows] = field(default_factory=list)
    # factor of the rows that must not enter the estimate
    loss_scale: Number = 1.0
    # a matrix without rows, of the dtype and device of the rows of all ranks
    like_ND: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, side: OnlineNaturalGradient, X_ND: Tensor, one_N: Tensor | None, *, needs_scale: bool = True) -> None:
        """Add rows by the present estimate, if the scale or an update needs them."""
        if not needs_scale and not side.updates_now():
            return
        X_ND, state = X_ND.contiguous(), side.current(X_ND)
        projection = fisher_projection.project(X_ND, state.left_RD, one_N, right_RD=state.right_RD)
        assert projection.sum_sq_hat is not None
        self.sum_sq, self.sum_sq_hat = self.sum_sq + projection.sum_sq, self.sum_sq_hat + projection.sum_sq_hat
        if side.updates_now():
            J_RD = ops.project_back(X_ND, projection.H_NR, one_N)
            self.J_RD = J_RD if self.J_RD is None else self.J_RD + J_RD

    def products(self, side: OnlineNaturalGradient) -> Tensor:
        """Return J of the rows of this rank, zeros without any."""
        return torch.zeros_like(side.current(self.like_ND).left_RD) if self.J_RD is None else self.J_RD


class SharedPass:
    """Moments of the layers of one optimizer between a backward pass and its step."""

    def __init__(self) -> None:
        self._moments: dict[OnlineNaturalGradient, _Moments] = {}
        # plain gradients of frozen biases, which nobody else averages
        self._biases: dict[LayerPreconditioner, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy must not contain rows of a minibatch.
        return {"_moments": {}, "_biases": {}}

    def observe(self, side: OnlineNaturalGradient, X_ND: Tensor, one_N: Tensor | None, num_rows: Number, *,
                keeps_rows: bool = False, needs_scale: bool = True) -> None:
        """Add the moments of rows [X | one], of which `num_rows` count."""
        moments = self._moments.setdefault(side, _Moments())
        moments.num_rows = moments.num_rows + num_rows
        if keeps_rows or not side.has_begun:
            moments.rows.append((X_ND.detach(), one_N))
        if side.has_begun:
            moments.add(side, X_ND.detach(), one_N, needs_scale=needs_scale)

    def observe_bias(self, layer: LayerPreconditioner, db_O: Tensor) -> None:
        """Add the plain gradient of a frozen bias."""
        self._biases[layer] = self._biases[layer] + db_O if layer in self._biases else db_O

    def drop(self, layer: LayerPreconditioner) -> None:
        """Forget the rows of a layer whose gradient was cleared."""
        self._biases.pop(layer, None)
        for side in layer.sides.values():
            self._moments.pop(side, None)

    def exchange(self, layers: Sequence[LayerPreconditioner], context: LayerContext) -> None:
        """Precondition the averaged gradients, and update the estimates, by the rows of all ranks.

        All ranks call this together, with the same layers.

        Raises:
            DivergenceError: rows of a rank are not finite, with on_nonfinite="raise".
        """
        used = [layer for layer in layers if layer.leaf.grad is not None]
        ranks = context.ranks
        assert ranks is not None
        num_averaged = ranks.size if ranks.averages else 1
        biases = {layer: self._biases.get(layer, torch.zeros_like(upcast(layer.bias))) for layer in used
                  if layer.bias is not None and not layer.bias.requires_grad}
        biases = dict(zip(biases, ranks.sums(list(biases.values())), strict=True))
        moments = self._taken([layer for layer in used if layer.reads_rows], context, num_averaged)
        _start([side for side in moments if not side.has_begun and side.dim != 1], moments, ranks)
        begun = [side for side in moments if side.has_begun]
        _sum_numbers([moments[side] for side in begun], ranks)
        for side in begun:
            if context.on_nonfinite == "raise" and not math.isfinite(float(moments[side].sum_sq)):
                raise DivergenceError(f"the rows given to {side.name} on the {ranks.size} ranks are not finite, or too large to be "
                                      "squared; lower the learning rate, or skip such minibatches with on_nonfinite=\"skip\".")
        due = [side for side in begun if side.updates_now()]
        products = dict(zip(due, ranks.sums([moments[side].products(side) for side in due]), strict=True))
        scales = {side: ops.rescaling(moments[side].sum_sq, moments[side].sum_sq_hat) for side in begun}
        for layer in used:
            sides = [side for side in layer.sides.values() if side in scales]
            if sides and layer.may_expect_scales(moments[sides[0]].like_ND.is_cpu, moments[sides[0]].num_rows):
                scales |= {side: side.scale_of(None) for side in sides if not side.updates_now()}
        if context.sums_row_products:
            _sum_row_products([layer for layer in used if "input" in layer.sides], moments, scales, ranks)
        for layer in used:
            layer.precondition_gradient({side: scales[side] for side in layer.sides.values() if side in scales},
                                        biases[layer] / num_averaged if layer in biases else None)
        for side in begun:
            own = moments[side]
            side.end_call(products.get(side), own.sum_sq, own.num_rows, own.loss_scale)

    def _taken(self, layers: Sequence[LayerPreconditioner], context: LayerContext,
               num_averaged: int) -> dict[OnlineNaturalGradient, _Moments]:
        """Return the moments of all sides of some layers, and forget them."""
        taken = {side: self._moments.get(side, _Moments()) for layer in layers for side in layer.sides.values()}
        self._moments, self._biases = {}, {}
        # A mean over the rows of a rank has derivatives that are larger by the number of ranks.
        scale = context.loss_scale() * (1 if context.is_sum else num_averaged)
        for layer in layers:
            for name, side in layer.sides.items():
                taken[side].loss_scale = 1.0 if name == "input" else scale
                taken[side].like_ND = upcast(layer.leaf).new_empty(0, side.dim or 0)
        return taken


def _start(new: Sequence[OnlineNaturalGradient], moments: Mapping[OnlineNaturalGradient, _Moments], ranks: Ranks) -> None:
    """Initialize estimates by the first rows of all ranks."""
    totals = [_Moments(sum(fisher_projection.sum_of_squares(X_ND.contiguous(), one_N) for X_ND, one_N in own.rows), 0.0,
                       own.num_rows) for own in (moments[side] for side in new)]
    _sum_numbers(totals, ranks)
    for side, total in zip(new, totals, strict=True):
        if float(total.num_rows) > 0.0 and math.isfinite(float(total.sum_sq)):
            own = moments[side]
            ones = [one_N for _, one_N in own.rows if one_N is not None]
            X_ND = torch.cat([X_ND for X_ND, _ in own.rows] or [own.like_ND])
            side.start(X_ND, torch.cat(ones) if ones else None, total.num_rows, own.loss_scale,
                       lambda own: own.copy_(ranks.sums([own])[0]))
            # in the dtype of the rows, also on a rank without rows
            side.current(own.like_ND)
            for rows in own.rows:
                own.add(side, *rows)


def _sum_row_products(layers: Sequence[LayerPreconditioner], moments: Mapping[OnlineNaturalGradient, _Moments],
                      scales: Mapping[OnlineNaturalGradient, Number], ranks: Ranks) -> None:
    """Set the sums over rows for the limit of C.3, relative to an averaged gradient."""
    own = []
    for layer in layers:
        norms = [torch.cat([_norms(rows, side) for rows in moments[side].rows] or [moments[side].like_ND.new_empty(0)])
                 for side in layer.sides.values()]
        own.append(torch.dot(*norms)[None])
    for layer, total in zip(layers, ranks.sums(own), strict=True):
        of_output = moments[layer.sides["output"]]
        scale = math.prod(scales.get(side, 1.0) for side in layer.sides.values())
        # The scale of the rows of a mean includes the number of ranks already.
        divisor = of_output.loss_scale * (ranks.size if ranks.averages and layer.context.is_sum else 1)
        layer.row_products, layer.num_rows = total[0] * scale / divisor, of_output.num_rows


def _norms(rows: _Rows, side: OnlineNaturalGradient) -> Tensor:
    """Return the norms of preconditioned rows, before rescaling."""
    X_ND, one_N = rows[0].contiguous(), rows[1]
    if side.has_begun:
        state = side.current(X_ND)
        projection = fisher_projection.project(X_ND, state.left_RD, one_N, right_RD=state.right_RD)
        assert projection.Xhat_ND is not None
        X_ND, one_N = projection.Xhat_ND, projection.one_hat_N
    return fisher_projection.row_norms(X_ND, one_N)


def _sum_numbers(all_moments: Sequence[_Moments], ranks: Ranks) -> None:
    """Sum the numbers of moments over the ranks; those of a device stay there."""
    numbers = [number for own in all_moments for number in (own.sum_sq, own.sum_sq_hat, own.num_rows)]
    if numbers:
        own = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=ranks.device) for number in numbers])
        (flat,) = ranks.sums([own])
        totals: Sequence[Number] = flat.tolist() if flat.is_cpu else flat.unbind()
        for place, moments in enumerate(all_moments):
            moments.sum_sq, moments.sum_sq_hat, moments.num_rows = totals[3 * place:3 * place + 3]
