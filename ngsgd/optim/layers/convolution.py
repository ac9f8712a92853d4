"""Convolutions with the natural gradient in the backward pass.

A Conv1d with one group is a TDNN layer. Its rows are the spliced inputs of each output frame with
an appended 1, and the derivatives of each output frame. It is preconditioned like an affine layer
(Kaldi's TdnnComponent). Conv2d, Conv3d and grouped convolutions follow Kaldi's
TimeHeightConvolutionComponent: the rows of the parameter gradient (one per filter) are
preconditioned, then the rows of its transpose.

Letters: B sequences, T frames, C channels in, O out, K taps; N = B T rows, I = C K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.ops.tensors import without_autocast
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.fisher.stack import Number
from ngsgd.optim.layers import common
from ngsgd.optim.layers.base import NaturalGradientLayer, asked_for, differentiable_gradients, is_differentiated, is_plain_context
from ngsgd.optim.layers.batched import Leaves, batches, leaves_of
from ngsgd.optim.layers.kronecker import KroneckerPreconditioner, ObservedLinear

# Maximum rank on both sides, as in Kaldi.
_MAX_RANK = 80
# One gradient is one sample, so the time constant is in updates of the estimates. Kaldi's period is
# 1.
_NUM_MINIBATCHES_HISTORY = 4.0


class Geometry(NamedTuple):
    """Stride, zero padding on both sides, and dilation, one number per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Geometry:
        """Create from one flat list, which operators take."""
        *slides, groups = numbers
        n = len(slides) // 3
        return cls(tuple(slides[:n]), tuple(slides[n : 2 * n]), tuple(slides[2 * n :]), groups)

    def flat(self) -> list[int]:
        """Return one flat list."""
        return [*self.stride, *self.padding, *self.dilation, self.groups]


class SplicedPreconditioner(KroneckerPreconditioner):
    """Fisher estimates of spliced input frames and of derivative frames of an ungrouped Conv1d."""

    needs_plain_gradient = False

    def record(self, x: Tensor, dY: Tensor, weight: Tensor, geometry: Geometry, leaves: Leaves) -> None:
        """Defer the gradient to the end of the backward pass (see `batched`)."""
        dY_NO = dY.transpose(1, 2).reshape(-1, dY.shape[1])
        self.context.batch.record(self, splice(x, weight.shape[2], geometry), dY_NO, leaves)


class ObservedTdnn(ObservedLinear, SplicedPreconditioner):
    """Fisher estimates of spliced input frames of a Conv1d with one group; gradients are plain."""


class FilterPreconditioner(common.LayerPreconditioner):
    """Fisher estimates of rows of the gradient (filters with bias), and of its transpose."""

    needs_plain_gradient = True

    def record(self, x: Tensor, dY: Tensor, weight: Tensor, geometry: Geometry, leaves: Leaves) -> None:
        """Defer the gradient to the end of the backward pass (see `batched`)."""
        _, dW, db = _plain_gradients(x, weight.to(dY.dtype), dY, geometry, (False, True, self.has_bias))
        assert dW is not None
        self.context.batch.record_filters(self, dY, dW, db, leaves)

    def __init__(self, context: common.LayerContext, num_columns: int, num_filters: int, has_bias: bool,
                 settings: common.FisherSettings) -> None:
        def side(dim: int) -> Any:
            return context.preconditioner(_MAX_RANK, dim, settings, num_minibatches_history=_NUM_MINIBATCHES_HISTORY)

        super().__init__(context, {"filters": side(num_columns + has_bias), "columns": side(num_filters)})
        self.has_bias = has_bias

    # under DistributedDataParallel of the averaged gradient
    reads_rows = False

    def gradient(self, dW: Tensor, db: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Precondition the plain gradients; under DistributedDataParallel the step does it."""
        if not self.is_shared:
            return self._preconditioned(dW, db, self.context.loss_scale())
        if self.bias is not None and not self.bias.requires_grad and db is not None:
            self.context.shared.observe_bias(self, common.upcast(db) / self.context.loss_scale())
        return dW, db

    def precondition_gradient(self, scales: Mapping[OnlineNaturalGradient, Number], db_O: Tensor | None) -> None:
        assert self.leaf.grad is not None
        own = self.bias.grad if self.bias is not None and self.bias.requires_grad else None
        # the averaged gradient of a sum is smaller than the sum
        ranks = self.context.ranks
        scale = 1.0 / ranks.size if ranks is not None and ranks.averages and self.context.is_sum else 1.0
        dW, db = self._preconditioned(self.leaf.grad, db_O if own is None else own, scale)
        self.leaf.grad.copy_(dW)
        if own is not None and db is not None:
            own.copy_(db)

    def _preconditioned(self, dW: Tensor, db: Tensor | None, loss_scale: Number) -> tuple[Tensor, Tensor | None]:
        P_OI = common.upcast(dW).reshape(dW.shape[0], -1)
        if db is not None:
            P_OI = torch.cat([P_OI, common.upcast(db)[:, None]], dim=1)
        scale: Tensor | float = 1.0
        for name in ("filters", "columns"):
            call = self.sides[name].begin(P_OI, loss_scale=loss_scale)
            if call is not None:
                P_OI, _, own_scale = call.preconditioned()
                scale = scale * own_scale
                self.sides[name].finish(call)
            P_OI = P_OI.T.contiguous()
        P_OI = P_OI * scale
        return (P_OI[:, :-1].reshape(dW.shape), P_OI[:, -1].clone()) if db is not None else (P_OI.view(dW.shape), None)


def splice(x: Tensor, taps: int, geometry: Geometry) -> Tensor:
    """Return the receptive fields of output frames, (B T) x (C K), columns as in the weight."""
    (stride,), (padding,), (dilation,) = geometry.stride, geometry.padding, geometry.dilation
    padded = nn.functional.pad(x, (padding, padding)) if padding else x
    # B x C x T x K, a view
    windows = padded.unfold(2, (taps - 1) * dilation + 1, stride)[..., ::dilation]
    return windows.transpose(1, 2).reshape(-1, x.shape[1] * taps)


class _Convolution(torch.autograd.Function):
    """A convolution with the preconditioned gradient instead of the plain one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
                layer: SplicedPreconditioner | FilterPreconditioner | None, geometry: Geometry,
                dtype: torch.dtype | None) -> Tensor:
        ctx.layer, ctx.geometry, ctx.has_bias = layer, geometry, bias is not None
        ctx.leaves = leaves_of(x, weight, bias, layer)
        ctx.input_dtype = x.dtype
        saved = weight
        x, weight, bias = common.cast(dtype, x, weight, bias)
        ctx.is_cast = x.dtype != ctx.input_dtype
        ctx.save_for_backward(x, saved)
        return convolve(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad[:3]
        needs_weight, is_added = asked_for(ctx, 1)
        is_added = not is_differentiated(ctx) and is_added
        with without_autocast(dY.device.type):
            if is_added and batches(ctx):
                dX = _plain_gradients(x, weight.to(dY.dtype), dY, ctx.geometry, (needs_x, False, False))[0]
                ctx.layer.record(x, dY, weight, ctx.geometry, ctx.leaves)
                return None if dX is None else dX.to(ctx.input_dtype), None, None, None, None, None
            # A trainable bias with a frozen weight gets its plain gradient.
            dX, dW, db = gradients(ctx.layer if is_added else None, x, weight, dY, ctx.geometry,
                                   (needs_x, needs_weight, ctx.has_bias))
        return None if dX is None else dX.to(ctx.input_dtype), dW, db if needs_bias else None, None, None, None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Convolve as torch does, with 1 to 3 spatial dimensions."""
    y: Tensor = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[x.ndim - 3](x, weight, bias, *geometry)
    return y


def gradients(layer: Any, x: Tensor, weight: Tensor, dY: Tensor, geometry: Geometry,
              wanted: tuple[bool, bool, bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the needed ones of (dX, dW, db); plain gradients without a preconditioner `layer`."""
    plain = layer is None or layer.needs_plain_gradient
    needs_x, needs_weight, has_bias = wanted
    dX, dW, db = _plain_gradients(x, weight.to(dY.dtype), dY, geometry, (needs_x, needs_weight and plain, has_bias and plain))
    if layer is not None:
        layer.begin_pass(dY, dY.numel() // dY.shape[1])
        if plain:
            dW, db = layer.gradient(dW, db)
        else:
            X_NI = splice(x, weight.shape[2], geometry)
            dW, db = layer.gradient(X_NI, dY.transpose(1, 2).reshape(-1, dY.shape[1]))
            dW = dW.view(weight.shape)
    return dX, dW, db


def _plain_gradients(x: Tensor, weight: Tensor, dY: Tensor, geometry: Geometry,
                     wanted: tuple[bool, bool, bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return torch's own gradients of input, weight and bias."""
    if not any(wanted):
        return None, None, None
    if torch.is_grad_enabled():
        # In one dimension torch cannot differentiate the operator below.
        dX, dW = differentiable_gradients(convolve(x, weight, None, geometry), (x, weight), wanted[:2], dY)
        return dX, dW, dY.flatten(2).sum(dim=(0, 2)) if wanted[2] else None
    dX, dW, db = torch.ops.aten.convolution_backward(
        dY, x, weight, [weight.shape[0]], geometry.stride, geometry.padding, geometry.dilation, False,
        [0] * len(geometry.stride), geometry.groups, list(wanted))
    return dX, dW, db


class _NaturalGradientConv(NaturalGradientLayer, nn.modules.conv._ConvNd):
    """Forward pass of all three replacements."""

    preconditioner: SplicedPreconditioner | FilterPreconditioner

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        if not torch.is_grad_enabled() or is_plain_context(input):
            return self.plain_forward(input)  # type: ignore[no-any-return]
        num_spatial = len(self.kernel_size)
        x = input.unsqueeze(0) if input.ndim == num_spatial + 1 else input
        padding = _symmetric_zeros(self)
        if padding is None:
            # Reflected, circular or one-sided padding is a separate step.
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = nn.functional.pad(x, self._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * num_spatial
        geometry = Geometry(self.stride, padding, self.dilation, self.groups)
        weight = self.weight
        if torch.compiler.is_compiling():
            y: Tensor = torch.ops.ngsgd.convolution(x, weight, self.bias, self.preconditioner.number_tensor,
                                                    geometry.flat(), common.compute_dtype(input))
        else:
            y = _Convolution.apply(x, weight, self.bias, self.estimates_of(weight),  # type: ignore[no-untyped-call]
                                   geometry, common.compute_dtype(input))
        return y if x.ndim == input.ndim else y.squeeze(0)


def _symmetric_zeros(layer: nn.modules.conv._ConvNd) -> tuple[int, ...] | None:
    """Return the padding if it is zeros, equal on both sides; else None."""
    if layer.padding_mode != "zeros":
        return None
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return tuple(t // 2 for t in total) if all(t % 2 == 0 for t in total) else None


class NaturalGradientConv1d(_NaturalGradientConv, nn.Conv1d):
    """Replacement of an `nn.Conv1d` under `NGSGD`."""


class NaturalGradientConv2d(_NaturalGradientConv, nn.Conv2d):
    """Replacement of an `nn.Conv2d` under `NGSGD`."""


class NaturalGradientConv3d(_NaturalGradientConv, nn.Conv3d):
    """Replacement of an `nn.Conv3d` under `NGSGD`."""
