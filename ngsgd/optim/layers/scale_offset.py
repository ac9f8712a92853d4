"""Normalization layers with the natural gradient of scale and offset in the backward pass.

Elementwise scales and offsets have one gradient row per frame: the output derivative for the
offset, and its product with the normalized input for the scale. These rows are preconditioned, then
summed (Kaldi's ScaleAndOffsetComponent). With many rows the sums are preconditioned, of which
torch's kernels have the plain ones (`ngsgd.optim.layers.kronecker` has the same form).

On a CPU torch's kernel normalizes, scales and shifts in one pass. Elsewhere, and for RMSNorm, the
affine part is a separate operator. Letters: N rows, D elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ngsgd.ops.tensors import FULL, without_autocast
from ngsgd.optim.fisher.estimate import RowMoments
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.fisher.stack import Number
from ngsgd.optim.layers.base import NaturalGradientLayer, asked_for, differentiable_gradients, is_differentiated, is_plain_context
from ngsgd.optim.layers.batched import batches, leaves_of
from ngsgd.optim.layers.common import FisherSettings, LayerContext, LayerPreconditioner, upcast


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
            self.context.shared.observe(side, rows_ND, None, self._num_rows(rows_ND, 1),
                                        needs_scale=not self.may_expect_scales(x.is_cpu, len(rows_ND)))
            return rows_ND.sum(dim=0)
        dim = x.shape[first : first + ndim].numel()
        if not self.needs_rows(name, x, dim):
            return self.of_sum(name, _sum_of_rows(x, first, ndim))
        rows_ND = _rows(x, first, ndim)
        if self.may_expect_scales(x.is_cpu, len(rows_ND)):
            moments = side.moments_of(rows_ND, loss_scale=self.context.loss_scale())
            return self.of_sum(name, rows_ND.sum(dim=0), moments)
        call = side.begin(rows_ND, num_rows=self._num_rows(rows_ND, 1), loss_scale=self.context.loss_scale())
        if call is None:
            return rows_ND.sum(dim=0)
        rows_hat_ND, _, scale = call.preconditioned()
        total_D = rows_hat_ND.sum(dim=0) * scale
        side.finish(call)
        return total_D

    def needs_rows(self, name: str, x: Tensor, dim: int) -> bool:
        """Return whether a minibatch needs the rows of a side, of `dim` elements of x."""
        return self.is_shared or self.sides[name].updates_now() or not self.may_expect_scales(x.is_cpu, x.numel() // dim)

    def of_sum(self, name: str, sum_D: Tensor, moments: RowMoments | None = None) -> Tensor:
        """Return the rescaled sum of preconditioned rows from the sum of rows, and end the call."""
        side: OnlineNaturalGradient = self.sides[name]
        total_D = _preconditioned(sum_D, side).mul_(side.scale_of(moments))
        side.finish_moments(moments)
        return total_D

    def precondition_gradient(self, scales: Mapping[OnlineNaturalGradient, Number], db_O: Tensor | None) -> None:
        for side, p in zip(self.sides.values(), (self.weight, self.bias), strict=False):
            if side in scales and p is not None and p.grad is not None and side.factors is not None:
                p.grad.copy_(_preconditioned(upcast(p.grad).flatten(), side).mul_(scales[side]).view_as(p))

    def _num_rows(self, x: Tensor, dim: int) -> Tensor | float:
        return (x != 0).any(dim=dim).sum() if self.context.ignore_zero_rows else float(x.numel() // x.shape[dim])


def _preconditioned(sum_D: Tensor, side: OnlineNaturalGradient) -> Tensor:
    """Return a sum of preconditioned rows, before rescaling, from the sum of rows."""
    assert side.factors is not None
    left_RD, right_RD = (factor.to(sum_D) for factor in side.factors)
    return torch.addmv(sum_D, right_RD.T, left_RD @ sum_D, alpha=-1)


class ScaleOffset(torch.autograd.Function):
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
    total_D = _sum_of_rows(x, first, ndim) if layer is None else layer.gradient(name, x, first, ndim)
    return total_D.view_as(parameter)


def _along(parameter: Tensor, x: Tensor, first: int) -> Tensor:
    """Return the parameter in a shape that broadcasts along the dimensions of x from `first` on."""
    behind = x.ndim - first - parameter.ndim
    return parameter.reshape(*parameter.shape, *[1] * behind)


def _sum_of_rows(x: Tensor, first: int, ndim: int) -> Tensor:
    """Return the sum of `_rows`, without a copy of x."""
    others = [dim for dim in range(x.ndim) if not first <= dim < first + ndim]
    return x.sum(dim=others).flatten() if others else x.flatten()


def _rows(x: Tensor, first: int, ndim: int) -> Tensor:
    """Return x as N x D, where D counts the elements of `ndim` dimensions from `first` on."""
    dim = x.shape[first : first + ndim].numel()
    if x.ndim > first + ndim:
        # Channels of a batch normalization.
        x = x.movedim(first, -1)
    return x.reshape(-1, dim)

class _Kernel(NamedTuple):
    """Torch's kernel of a normalization with its affine part."""

    # (x, scale, offset) -> (y, mean, 1 / standard deviation)
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    # (dY, x, mean, 1 / deviation, scale, offset, needed) -> gradients
    backward: Callable[..., Any]
    # (x, mean, 1 / deviation) -> x without the affine part
    normalized: Callable[[Tensor, Tensor, Tensor], Tensor]
    # (x, scale, offset) -> y, which autograd can differentiate twice
    plain: Callable[..., Tensor]


class FusedNorm(torch.autograd.Function):
    """A normalization with its affine part, on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, offset: Tensor | None, kernel: _Kernel,
                layer: ScaleOffsetPreconditioner | None, first: int) -> Tensor:
        ctx.kernel, ctx.layer, ctx.first = kernel, layer, first
        y, mean, rstd = kernel.forward(x, scale, offset)
        ctx.save_for_backward(x, scale, offset, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, offset, mean, rstd = ctx.saved_tensors
        asked = asked_for(ctx, 1), asked_for(ctx, 2)
        needed = (ctx.needs_input_grad[0], *(is_needed for is_needed, _ in asked))
        # Torch enables gradients in a pass that is differentiated. Its gradients are plain.
        if torch.is_grad_enabled():
            y = ctx.kernel.plain(x, scale, offset)
            return *differentiable_gradients(y, (x, scale, offset), needed, dY), None, None, None
        dX, *plain = ctx.kernel.backward(dY, x, mean, rstd, scale, offset, needed)
        layer = ctx.layer
        if layer is not None and any(is_added for _, is_added in asked):
            layer.begin_pass(dY, dY.numel() // scale.numel())
            for place, (name, (_, is_added)) in enumerate(zip(("scale", "offset"), asked, strict=True)):
                if is_added and not layer.needs_rows(name, x, scale.numel()):
                    plain[place] = layer.of_sum(name, plain[place].flatten()).view_as(scale)
                elif is_added:
                    rows = dY * ctx.kernel.normalized(x, mean, rstd) if name == "scale" else dY
                    plain[place] = layer.gradient(name, rows, ctx.first, scale.ndim).view_as(scale)
        return dX, *plain, None, None, None


class NaturalGradientNorm(NaturalGradientLayer):
    """Replacement of an affine normalization."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        """Return the normalized input times scale plus offset."""
        if is_plain_context(input):
            return self.plain_forward(input)  # type: ignore[no-any-return]
        weight, bias, first = self.weight, getattr(self, "bias", None), self.first(input)
        # The functions of torch handle and check other shapes, and its kernels do not.
        is_usual = input.shape[first : first + weight.ndim] == weight.shape and input.numel() > weight.numel()
        if torch.compiler.is_compiling():
            y = torch.ops.ngsgd.scale_offset(self.normalized(input), weight, bias, self.preconditioner.number_tensor, [first], None)
        elif self.has_kernel and is_usual and input.is_cpu and input.dtype == weight.dtype and input.dtype in FULL:
            y = FusedNorm.apply(input, weight, bias, self.kernel(input), self.estimates_of(weight),  # type: ignore[no-untyped-call]
                                first)
        else:
            normalized = self.normalized(input)
            y = ScaleOffset.apply(normalized, weight, bias, self.estimates_of(weight), first)  # type: ignore[no-untyped-call]
        return y  # type: ignore[no-any-return]

    has_kernel = True

    def first(self, x: Tensor) -> int:
        """Return the dimension of x along which the scale lies."""
        return 1


class NaturalGradientLayerNorm(NaturalGradientNorm, nn.LayerNorm):
    """Replacement of an `nn.LayerNorm` under `NGSGD`."""

    def first(self, x: Tensor) -> int:
        return x.ndim - len(self.normalized_shape)

    def kernel(self, _x: Tensor) -> _Kernel:
        """Return torch's kernel for this pass."""
        shape, eps, passes_back = list(self.normalized_shape), self.eps, torch.ops.aten.native_layer_norm_backward
        return _Kernel(lambda x, scale, offset: torch.native_layer_norm(x, shape, scale, offset, eps),
                       lambda dY, x, *others: passes_back(dY.contiguous(), x, shape, *others),
                       _standardized,
                       lambda x, scale, offset: functional.layer_norm(x, shape, scale, offset, eps))

    def normalized(self, x: Tensor) -> Tensor:
        """Normalize without the affine part."""
        return functional.layer_norm(x, self.normalized_shape, None, None, self.eps)


class NaturalGradientRMSNorm(NaturalGradientNorm, nn.RMSNorm):
    """Replacement of an `nn.RMSNorm` under `NGSGD`."""

    has_kernel = False

    def first(self, x: Tensor) -> int:
        return x.ndim - len(self.normalized_shape)

    def normalized(self, x: Tensor) -> Tensor:
        """Normalize without the affine part."""
        return functional.rms_norm(x, self.normalized_shape, None, self.eps)


class NaturalGradientGroupNorm(NaturalGradientNorm, nn.GroupNorm):
    """Replacement of an `nn.GroupNorm` under `NGSGD`."""

    def kernel(self, x: Tensor) -> _Kernel:
        """Return torch's kernel for this pass."""
        sizes = (x.shape[0], x.shape[1], x.shape[2:].numel(), self.num_groups)
        groups, eps, passes_back = self.num_groups, self.eps, torch.ops.aten.native_group_norm_backward
        return _Kernel(lambda x, scale, offset: torch.native_group_norm(x.contiguous(), scale, offset, *sizes, eps),
                       lambda dY, x, mean, rstd, scale, _, needed: passes_back(dY.contiguous(), x.contiguous(), mean, rstd, scale,
                                                                              *sizes, needed),
                       lambda x, *moments: _standardized(x.unflatten(1, (groups, -1)).flatten(2),
                                                         *(one[..., None] for one in moments)).view(x.shape),
                       lambda x, scale, offset: functional.group_norm(x, groups, scale, offset, eps))

    def normalized(self, x: Tensor) -> Tensor:
        """Normalize without the affine part."""
        return functional.group_norm(x, self.num_groups, None, None, self.eps)


def _standardized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x - mean) * rstd


class _NaturalGradientBatchNorm(NaturalGradientNorm):
    """Base class of the three batch normalizations."""

    def _statistics(self: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None, bool, float]:
        """Count the minibatch; return (mean, variance, whether the batch has them, momentum)."""
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
        return self.running_mean if is_used else None, self.running_var if is_used else None, of_batch, momentum

    def kernel(self: Any, x: Tensor) -> _Kernel:
        """Return torch's kernel for this pass."""
        mean, variance, of_batch, momentum = self._statistics(x)
        eps, shape, passes_back = self.eps, (-1, *[1] * (x.ndim - 2)), torch.ops.aten.native_batch_norm_backward

        def normalized(x: Tensor, *of_pass: Tensor) -> Tensor:
            moments = of_pass if of_batch else (mean, (variance + eps).rsqrt())
            return _standardized(x, *(one.view(shape) for one in moments))
        return _Kernel(lambda x, scale, offset: torch.native_batch_norm(x, scale, offset, mean, variance, of_batch, momentum, eps),
                       lambda dY, x, own, rstd, scale, _, needed: passes_back(
                           dY, x, scale, mean, variance, own, rstd, of_batch, eps, needed),
                       normalized,
                       lambda x, scale, offset: functional.batch_norm(x, None if of_batch else mean, None if of_batch else variance,
                                                                      scale, offset, of_batch, 0.0, eps))

    def normalized(self: Any, x: Tensor) -> Tensor:
        """Normalize without the affine part; update the running statistics as torch does."""
        mean, variance, of_batch, momentum = self._statistics(x)
        return functional.batch_norm(x, mean, variance, None, None, of_batch, momentum, self.eps)


class NaturalGradientBatchNorm1d(_NaturalGradientBatchNorm, nn.BatchNorm1d):
    """Replacement of an `nn.BatchNorm1d` under `NGSGD`."""


class NaturalGradientBatchNorm2d(_NaturalGradientBatchNorm, nn.BatchNorm2d):
    """Replacement of an `nn.BatchNorm2d` under `NGSGD`."""


class NaturalGradientBatchNorm3d(_NaturalGradientBatchNorm, nn.BatchNorm3d):
    """Replacement of an `nn.BatchNorm3d` under `NGSGD`."""
