"""Normalisation layers with the natural gradient of their scale and offset in the backward pass.

Per-element scales and offsets have one gradient row per frame: the output derivative for the offset, the derivative times
the normalised input for the scale.  These rows are preconditioned, then summed (Kaldi's ScaleAndOffsetComponent).
Letters: N rows, D elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ngsgd.optim.layers.base import NaturalGradientLayer, asked_for, is_plain_context
from ngsgd.optim.layers.common import FisherSettings, LayerContext, LayerPreconditioner, apply, upcast, without_autocast
from ngsgd.preconditioners.online import OnlineNaturalGradient


class ScaleOffsetPreconditioner(LayerPreconditioner):
    """One estimate for the rows of the scale, one for those of the offset."""

    def __init__(self, context: LayerContext, dim: int, has_offset: bool,
                 settings: FisherSettings) -> None:
        names = ("scale", "offset") if has_offset else ("scale",)
        super().__init__(context,
                         {name: context.preconditioner(settings.rank_in, dim,
                                                       settings) for name in names})

    def gradient(self, name: str, rows_ND: Tensor) -> Tensor:
        """The sum of the preconditioned rows, rescaled."""
        side: OnlineNaturalGradient = self.sides[name]
        num_rows: Tensor | float = float(len(rows_ND))
        if self.context.ignore_zero_rows:
            num_rows = (rows_ND != 0).any(dim=1).sum()
        call = side.begin(rows_ND, num_rows=num_rows, loss_scale=self.context.loss_scale())
        if call is None:
            return rows_ND.sum(dim=0)
        rows_hat_ND, _, scale = call.preconditioned()
        total_D: Tensor = rows_hat_ND.sum(dim=0) * scale
        side.finish(call)
        return total_D


class _ScaleOffset(torch.autograd.Function):
    """y = x * scale + offset; the parameters lie along the dimensions from `first` on, `ndim` of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, offset: Tensor | None, layer: ScaleOffsetPreconditioner | None,
                first: int) -> Tensor:
        ctx.layer, ctx.first = layer, first
        ctx.save_for_backward(x, scale)
        scale_b = _along(scale, x, first).to(x.dtype)
        return x * scale_b if offset is None else torch.addcmul(_along(offset, x, first).to(x.dtype), x, scale_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[0]
        (needs_scale, scale_is_added), (needs_offset, offset_is_added) = asked_for(ctx, 1), asked_for(ctx, 2)
        if ctx.layer is not None and (scale_is_added or offset_is_added):
            ctx.layer.begin_pass(dY, dY.numel() // scale.numel())
        d_scale = d_offset = None
        with without_autocast(dY.device.type):
            dX = dY * _along(scale, x, ctx.first).to(dY.dtype) if needs_x else None
            if needs_scale:
                rows_ND = _rows(upcast(dY) * upcast(x), scale, ctx.first)
                d_scale = _sum(ctx.layer if scale_is_added else None, "scale", rows_ND).view_as(scale)
            if needs_offset:
                rows_ND = _rows(upcast(dY), scale, ctx.first)
                d_offset = _sum(ctx.layer if offset_is_added else None, "offset", rows_ND).view_as(scale)
        return dX, d_scale, d_offset, None, None


def _sum(layer: ScaleOffsetPreconditioner | None, name: str, rows_ND: Tensor) -> Tensor:
    return rows_ND.sum(dim=0) if layer is None else layer.gradient(name, rows_ND)


def _along(parameter: Tensor, x: Tensor, first: int) -> Tensor:
    """The parameter shaped so that it broadcasts along x's dimensions from `first` on."""
    behind = x.ndim - first - parameter.ndim
    return parameter.reshape(*parameter.shape, *[1] * behind)


def _rows(x: Tensor, parameter: Tensor, first: int) -> Tensor:
    """x as N x D, D the elements of the parameter."""
    behind = x.ndim - first - parameter.ndim
    if behind:
        # channels of a batch normalisation
        x = x.movedim(first, -1)
    return x.reshape(-1, parameter.numel())


class NaturalGradientNorm(NaturalGradientLayer):
    """What `NGSGD` turns an affine normalisation into: the same layer without its affine part, and that part after it."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        if is_plain_context(input):
            return self.plain_forward(input)  # type: ignore[no-any-return]
        # a twin for the normalisation: it shares buffers and settings as they are now, but has no
        # affine part and no hooks
        twin = object.__new__(self.plain_class)
        twin.__dict__ = {**self.__dict__, "_parameters": dict.fromkeys(self._parameters)}
        normalised = self.plain_class.forward(twin, input)
        first = input.ndim - self.weight.ndim if isinstance(self, (nn.LayerNorm, nn.RMSNorm)) else 1
        weight = self.weight
        return apply(_ScaleOffset, normalised, weight, getattr(self, "bias", None), self.estimates_of(weight), first)


class NaturalGradientLayerNorm(NaturalGradientNorm, nn.LayerNorm):
    """What `NGSGD` turns an `nn.LayerNorm` into."""


class NaturalGradientRMSNorm(NaturalGradientNorm, nn.RMSNorm):
    """What `NGSGD` turns an `nn.RMSNorm` into."""


class NaturalGradientGroupNorm(NaturalGradientNorm, nn.GroupNorm):
    """What `NGSGD` turns an `nn.GroupNorm` into."""


class NaturalGradientBatchNorm1d(NaturalGradientNorm, nn.BatchNorm1d):
    """What `NGSGD` turns an `nn.BatchNorm1d` into."""


class NaturalGradientBatchNorm2d(NaturalGradientNorm, nn.BatchNorm2d):
    """What `NGSGD` turns an `nn.BatchNorm2d` into."""


class NaturalGradientBatchNorm3d(NaturalGradientNorm, nn.BatchNorm3d):
    """What `NGSGD` turns an `nn.BatchNorm3d` into."""
