"""Normalization layers with the natural gradient of scale and offset in the backward pass.

Elementwise scales and offsets have one gradient row per frame: the output derivative for the
offset, and its product with the normalized input for the scale. These rows are preconditioned, then
summed (Kaldi's ScaleAndOffsetComponent). Letters: N rows, D elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.ops.tensors import without_autocast
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.fisher.stack import Number
from ngsgd.optim.layers.base import NaturalGradientLayer, asked_for, is_differentiated, is_plain_context
from ngsgd.optim.layers.batched import batches, leaves_of
from ngsgd.optim.layers.common import FisherSettings, LayerContext, LayerPreconditioner, upcast

# Up to this dimension, X^T X costs no more than the projections of all rows.
_FEW_ELEMENTS = 32


class ScaleOffsetPreconditioner(LayerPreconditioner):
    """One Fisher estimate for rows of the scale, one for rows of the offset."""

    def __init__(self, context: LayerContext, dim: int, has_offset: bool, settings: FisherSettings) -> None:
        names = ("scale", "offset") if has_offset else ("scale",)
        super().__init__(context, {name: context.preconditioner(settings.rank_in, dim, settings) for name in names})

    def gradient(self, name: str, x: Tensor, first: int, ndim: int) -> Tensor:
        """Return the rescaled sum of preconditioned rows, `ndim` dimensions of x from `first`."""
        side: OnlineNaturalGradient = self.sides[name]
        if self.is_shared:
            rows_ND = _rows(x, first, ndim)
            self.context.shared.observe(side, rows_ND, None, self._num_rows(rows_ND, 1))
            return rows_ND.sum(dim=0)
        dim = x.shape[first : first + ndim].numel()
        if x.is_cpu and 1 < dim <= _FEW_ELEMENTS:
            S_DD, sum_D, num_rows = self._moments(x, first, ndim, dim)
            total_D = side.precondition_sum(S_DD, sum_D, num_rows=num_rows, loss_scale=self.context.loss_scale())
            if total_D is not None:
                return total_D
        rows_ND = _rows(x, first, ndim)
        call = side.begin(rows_ND, num_rows=self._num_rows(rows_ND, 1), loss_scale=self.context.loss_scale())
        if call is None:
            return rows_ND.sum(dim=0)
        rows_hat_ND, _, scale = call.preconditioned()
        total_D = rows_hat_ND.sum(dim=0) * scale
        side.finish(call)
        return total_D

    def precondition_gradient(self, scales: Mapping[OnlineNaturalGradient, Number], db_O: Tensor | None) -> None:
        for side, p in zip(self.sides.values(), (self.weight, self.bias), strict=False):
            if side in scales and p is not None and p.grad is not None and (factors := side.factors) is not None:
                sum_D = upcast(p.grad).flatten()
                left_RD, right_RD = (factor.to(sum_D) for factor in factors)
                p.grad.copy_(torch.addmv(sum_D, right_RD.T, left_RD @ sum_D, alpha=-1).mul_(scales[side]).view_as(p))

    def _moments(self, x: Tensor, first: int, ndim: int, dim: int) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return (X^T X, sum of rows, number of rows), without a copy of x as rows."""
        if x.ndim == first + ndim:
            rows_ND = x.reshape(-1, dim)
            return rows_ND.T @ rows_ND, rows_ND.sum(dim=0), self._num_rows(rows_ND, 1)
        # Channels of a batch normalization.
        x_BDT = x.flatten(2)
        return (torch.bmm(x_BDT, x_BDT.transpose(1, 2)).sum(dim=0), x_BDT.sum(dim=(0, 2)), self._num_rows(x_BDT, 1))

    def _num_rows(self, x: Tensor, dim: int) -> Tensor | float:
        return (x != 0).any(dim=dim).sum() if self.context.ignore_zero_rows else float(x.numel() // x.shape[dim])


class _ScaleOffset(torch.autograd.Function):
    """y = x * scale + offset; the parameters lie along `ndim` dimensions from `first` on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, offset: Tensor | None, layer: ScaleOffsetPreconditioner | None,
                first: int) -> Tensor:
        ctx.layer, ctx.first, ctx.is_cast = layer, first, False
        ctx.leaves = leaves_of(x, scale, offset, layer)
        ctx.save_for_backward(x, scale)
        return scaled(x, scale, offset, first)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        (needs_scale, scale_is_added), (needs_offset, offset_is_added) = asked_for(ctx, 1), asked_for(ctx, 2)
        if is_differentiated(ctx):
            scale_is_added = offset_is_added = False
        with without_autocast(dY.device.type):
            dX = input_gradient(x, scale, dY, ctx.first) if ctx.needs_input_grad[0] else None
            if scale_is_added and batches(ctx):
                num_inner = dY.shape[ctx.first + scale.ndim :].numel()
                ctx.layer.context.batch.record_sums(ctx.layer, x, dY, ctx.leaves, num_inner)
                return dX, None, None, None, None
            d_scale, d_offset = gradients(ctx.layer, x, scale, dY, ctx.first, (needs_scale, needs_offset),
                                          (scale_is_added, offset_is_added))
        return dX, d_scale, d_offset, None, None


def scaled(x: Tensor, scale: Tensor, offset: Tensor | None, first: int) -> Tensor:
    """Return x * scale + offset."""
    scale_b = _along(scale, x, first).to(x.dtype)
    return x * scale_b if offset is None else torch.addcmul(_along(offset, x, first).to(x.dtype), x, scale_b)


def input_gradient(x: Tensor, scale: Tensor, dY: Tensor, first: int) -> Tensor:
    """Return dX."""
    return dY * _along(scale, x, first).to(dY.dtype)


def gradients(layer: ScaleOffsetPreconditioner | None, x: Tensor, scale: Tensor, dY: Tensor, first: int,
              needed: tuple[bool, bool], added: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """Return the needed gradients of (scale, offset); those `added` to `grad` preconditioned."""
    if layer is not None and any(added):
        layer.begin_pass(dY, dY.numel() // scale.numel())
    d_scale = d_offset = None
    if needed[0]:
        d_scale = _sum(layer if added[0] else None, "scale", upcast(dY) * upcast(x), scale, first)
    if needed[1]:
        d_offset = _sum(layer if added[1] else None, "offset", upcast(dY), scale, first)
    return d_scale, d_offset


def _sum(layer: ScaleOffsetPreconditioner | None, name: str, x: Tensor, parameter: Tensor, first: int) -> Tensor:
    ndim = parameter.ndim
    total_D = _rows(x, first, ndim).sum(dim=0) if layer is None else layer.gradient(name, x, first, ndim)
    return total_D.view_as(parameter)


def _along(parameter: Tensor, x: Tensor, first: int) -> Tensor:
    """Return the parameter in a shape that broadcasts along the dimensions of x from `first` on."""
    behind = x.ndim - first - parameter.ndim
    return parameter.reshape(*parameter.shape, *[1] * behind)


def _rows(x: Tensor, first: int, ndim: int) -> Tensor:
    """Return x as N x D, where D counts the elements of `ndim` dimensions from `first` on."""
    dim = x.shape[first : first + ndim].numel()
    if x.ndim > first + ndim:
        # Channels of a batch normalization.
        x = x.movedim(first, -1)
    return x.reshape(-1, dim)


class NaturalGradientNorm(NaturalGradientLayer):
    """Replacement of an affine normalization: the layer without its affine part, then that part."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        """Return the normalized input times scale plus offset."""
        if is_plain_context(input):
            return self.plain_forward(input)  # type: ignore[no-any-return]
        normalized = self.normalized(input)
        first = input.ndim - self.weight.ndim if isinstance(self, (nn.LayerNorm, nn.RMSNorm)) else 1
        weight, bias = self.weight, getattr(self, "bias", None)
        if torch.compiler.is_compiling():
            y = torch.ops.ngsgd.scale_offset(normalized, weight, bias, self.preconditioner.number_tensor, [first], None)
        else:
            y = _ScaleOffset.apply(normalized, weight, bias, self.estimates_of(weight),  # type: ignore[no-untyped-call]
                                   first)
        return y  # type: ignore[no-any-return]


class NaturalGradientLayerNorm(NaturalGradientNorm, nn.LayerNorm):
    """Replacement of an `nn.LayerNorm` under `NGSGD`."""

    def normalized(self, x: Tensor) -> Tensor:
        """Normalize without the affine part."""
        return nn.functional.layer_norm(x, self.normalized_shape, None, None, self.eps)


class NaturalGradientRMSNorm(NaturalGradientNorm, nn.RMSNorm):
    """Replacement of an `nn.RMSNorm` under `NGSGD`."""

    def normalized(self, x: Tensor) -> Tensor:
        """Normalize without the affine part."""
        return nn.functional.rms_norm(x, self.normalized_shape, None, self.eps)


class NaturalGradientGroupNorm(NaturalGradientNorm, nn.GroupNorm):
    """Replacement of an `nn.GroupNorm` under `NGSGD`."""

    def normalized(self, x: Tensor) -> Tensor:
        """Normalize without the affine part."""
        return nn.functional.group_norm(x, self.num_groups, None, None, self.eps)


class _NaturalGradientBatchNorm(NaturalGradientNorm):
    """Base class of the three batch normalizations."""

    def normalized(self: Any, x: Tensor) -> Tensor:
        """Normalize without the affine part; update the running statistics as torch does."""
        self._check_input_dim(x)
        tracks = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            # None: the mean over all minibatches.
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        is_used = not self.training or self.track_running_stats
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        return nn.functional.batch_norm(x, self.running_mean if is_used else None, self.running_var if is_used else None,
                                        None, None, of_batch, momentum, self.eps)


class NaturalGradientBatchNorm1d(_NaturalGradientBatchNorm, nn.BatchNorm1d):
    """Replacement of an `nn.BatchNorm1d` under `NGSGD`."""


class NaturalGradientBatchNorm2d(_NaturalGradientBatchNorm, nn.BatchNorm2d):
    """Replacement of an `nn.BatchNorm2d` under `NGSGD`."""


class NaturalGradientBatchNorm3d(_NaturalGradientBatchNorm, nn.BatchNorm3d):
    """Replacement of an `nn.BatchNorm3d` under `NGSGD`."""
