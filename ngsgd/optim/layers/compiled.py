"""The affine layer as opaque operators, so that `torch.compile` takes a whole model without a graph break.

A Fisher estimate is state that changes in the backward pass, which a traced graph cannot hold.  The operators
find it by a number.  Outside of `torch.compile` the autograd Function in linear.py does the same arithmetic
and costs less.  `ngsgd.optim.layers.attach` lists the other ways to read rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import gemm
from ngsgd.optim.layers.base import adds_to_grad
from ngsgd.optim.layers.common import cast, layer_of, upcast
from ngsgd.optim.layers.kronecker import KroneckerPreconditioner


def _layer(number: int) -> KroneckerPreconditioner:
    layer = layer_of(number)
    assert isinstance(layer, KroneckerPreconditioner)
    return layer


@torch.library.custom_op("ngsgd::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: int, dtype: torch.dtype | None) -> Tensor:
    """`torch.nn.functional.linear` in `dtype`, if given."""
    return gemm.linear(*cast(dtype, x, weight, bias))


@torch.library.custom_op("ngsgd::linear_gradients", mutates_args=())
def linear_gradients(x: Tensor, dY: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """(weight gradient, bias gradient), preconditioned where they are added to `grad`; the second is empty without a bias."""
    layer, X_NI, dY_NO = _layer(number), gemm.rows_of(x), gemm.rows_of(dY)
    if adds_to_grad(layer):
        layer.begin_pass(dY_NO, len(dY_NO))
        dW, db = layer.gradient(X_NI, dY_NO)
    else:
        X_NI, dY_NO = upcast(X_NI), upcast(dY_NO)
        dW, db = dY_NO.T @ X_NI, dY_NO.sum(dim=0) if layer.has_bias else None
    return dW, dW.new_empty(0) if db is None else db


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, number: int, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype or x.dtype)


@linear_gradients.register_fake
def _(x: Tensor, dY: Tensor, number: int) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    has_bias = _layer(number).has_bias
    return (x.new_empty((dY.shape[-1], x.shape[-1]), dtype=dtype),
            x.new_empty(dY.shape[-1] if has_bias else 0, dtype=dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.number, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias, ctx.compute_dtype = bias is not None, output.dtype


def _backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dX = (dY @ weight.to(dY.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        db = gemm.rows_of(dY).sum(dim=0) if ctx.has_bias else None
        return dX, None, db, None, None
    dW, db = linear_gradients(x.to(ctx.compute_dtype), dY, ctx.number)
    return dX, dW.to(weight.dtype), db.to(weight.dtype) if ctx.has_bias else None, None, None


linear.register_autograd(_backward, setup_context=_setup_context)
