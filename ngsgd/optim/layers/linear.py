"""y = x W^T + b with the natural gradient in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.ops import gemm
from ngsgd.ops.tensors import without_autocast
from ngsgd.optim.layers.base import NaturalGradientLayer, asked_for, is_differentiated, is_plain_context
from ngsgd.optim.layers.batched import batches, leaves_of
from ngsgd.optim.layers.common import cast, compute_dtype
from ngsgd.optim.layers.kronecker import KroneckerPreconditioner


class _Affine(torch.autograd.Function):
    """`torch.nn.functional.linear` with the preconditioned gradient instead of the plain one."""

    @staticmethod
    # A separate setup_context would cost 0.1 ms per call.
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: KroneckerPreconditioner | None,
                dtype: torch.dtype | None, is_transposed: bool) -> Tensor:
        ctx.layer, ctx.is_transposed = layer, is_transposed
        ctx.leaves = None if is_transposed else leaves_of(x, weight, bias, layer)
        ctx.input_dtype = x.dtype
        saved = weight
        x, weight, bias = cast(dtype, x, weight, bias)
        ctx.is_cast = x.dtype != ctx.input_dtype
        ctx.save_for_backward(x, saved)
        return gemm.linear(x, weight.T if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight = weight.T if ctx.is_transposed else weight
        with without_autocast(dY.device.type):
            (dX,) = cast(ctx.input_dtype, gemm.input_gradient(dY, weight) if ctx.needs_input_grad[0] else None)
            is_needed, is_added = asked_for(ctx, 1)
            is_added = not is_differentiated(ctx) and is_added
            if is_added and batches(ctx):
                ctx.layer.context.batch.record(ctx.layer, gemm.rows_of(x), gemm.rows_of(dY), ctx.leaves)
                return dX, None, None, None, None, None
            dW, db = gradients(ctx.layer if is_added else None, x, dY, is_needed, ctx.needs_input_grad[2])
        return dX, dW.T if dW is not None and ctx.is_transposed else dW, db, None, None, None


def gradients(layer: KroneckerPreconditioner | None, x: Tensor, dY: Tensor, needs_weight: bool,
              needs_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the needed ones of (dW, db); plain without a layer, and db of a frozen weight."""
    dY_NO = gemm.rows_of(dY)
    if layer is None or not needs_weight:
        (X_NI,) = cast(dY.dtype, gemm.rows_of(x))
        return gemm.mm(dY_NO.T, X_NI) if needs_weight else None, dY_NO.sum(dim=0) if needs_bias else None
    layer.begin_pass(dY_NO, dY_NO.shape[0])
    dW, db = layer.gradient(gemm.rows_of(x), dY_NO)
    return dW, db if needs_bias else None


def affine(layer: NaturalGradientLayer, x: Tensor, weight: Tensor, bias: Tensor | None, *,
           is_transposed: bool = False) -> Tensor:
    """Return x W^T + b (or x W + b), with the natural gradient of `layer`, whose leaf is W."""
    y: Tensor
    if torch.compiler.is_compiling():
        y = torch.ops.ngsgd.linear(
            x, weight.T if is_transposed else weight, bias, layer.preconditioner.number_tensor, [], compute_dtype(x))
    else:
        y = _Affine.apply(x, weight, bias, layer.estimates_of(weight),  # type: ignore[no-untyped-call]
                          compute_dtype(x), is_transposed)
    return y


class NaturalGradientLinear(NaturalGradientLayer, nn.Linear):
    """Replacement of an `nn.Linear` under `NGSGD`: the same parameters, names and forward pass."""

    preconditioner: KroneckerPreconditioner

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        """Return x W^T + b."""
        if not torch.is_grad_enabled() or is_plain_context(input):
            return self.plain_forward(input)  # type: ignore[no-any-return]
        return affine(self, input, self.weight, self.bias)


class NaturalGradientTransposedLinear(NaturalGradientLayer):
    """Base class for a Conv1D of Hugging Face under `NGSGD`; its weight is inputs x outputs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return x W + b."""
        if not torch.is_grad_enabled() or is_plain_context(x):
            return self.plain_forward(x)  # type: ignore[no-any-return]
        return affine(self, x, self.weight, self.bias, is_transposed=True)
