"""The layers as opaque operators, so that `torch.compile` traces a model without a graph break.

A Fisher estimate changes in the backward pass, and a traced graph cannot contain such state. The
operators find it by a number. The number is a tensor, because a graph is recompiled for each new
value of a Python number. Outside `torch.compile` the autograd Functions of the layers compute the
same at lower cost. `ngsgd.optim.layers.attach` lists the other ways to read rows. Layers call the
operators as `torch.ops.ngsgd`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import gemm
from ngsgd.ops.tensors import without_autocast
from ngsgd.optim.layers import convolution, linear, scale_offset
from ngsgd.optim.layers.base import adds_to_grad
from ngsgd.optim.layers.common import cast, layer_of


def _note_ranks(number: Tensor) -> None:
    """Note the DistributedDataParallel module of a forward pass; not while it is traced."""
    if type(number) is Tensor:
        layer_of(int(number)).context.note_ranks()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, geometry: Sequence[int],
            dtype: torch.dtype | None) -> Tensor:
    _note_ranks(number)
    return gemm.linear(*cast(dtype, x, weight, bias))


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, geometry: Sequence[int],
                 dtype: torch.dtype | None) -> Tensor:
    _note_ranks(number)
    x, weight, bias = cast(dtype, x, weight, bias)
    return convolution.convolve(x, weight, bias, convolution.Geometry.of(geometry))


def _scale_offset(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, geometry: Sequence[int],
                  dtype: torch.dtype | None) -> Tensor:
    _note_ranks(number)
    return scale_offset.scaled(x, weight, bias, geometry[0])


def _register(name: str, forward: Callable[..., Tensor], gradients: Callable[..., tuple[Tensor | None, Tensor | None]],
              input_gradient: Callable[..., Any]) -> None:
    """Create `torch.ops.ngsgd.<name>`; gradients accumulated into `grad` are preconditioned."""
    operator = torch.library.custom_op(f"ngsgd::{name}", forward, mutates_args=())
    operator.register_fake(forward)

    def of_parameters(x: Tensor, dY: Tensor, weight: Tensor, number: Tensor, geometry: Sequence[int], has_bias: bool,
                      is_frozen: bool) -> tuple[Tensor, Tensor]:
        layer = layer_of(int(number))
        with without_autocast(dY.device.type):
            dW, db = gradients(layer if not is_frozen and adds_to_grad(layer) else None, x, dY, weight, geometry, has_bias)
        assert dW is not None
        # Empty without a bias, because an operator returns tensors; strides are those of `fake`.
        return (dW.to(weight.dtype).contiguous(), weight.new_empty(0) if db is None else db.to(weight.dtype).contiguous())

    def fake(x: Tensor, dY: Tensor, weight: Tensor, number: Tensor, geometry: Sequence[int],
             has_bias: bool, is_frozen: bool) -> tuple[Tensor, Tensor]:
        shape = weight.shape if name == "scale_offset" else weight.shape[:1]
        return (torch.empty_like(weight, memory_format=torch.contiguous_format),
                weight.new_empty(shape if has_bias else 0))

    gradients_operator = torch.library.custom_op(f"ngsgd::{name}_gradients", of_parameters, mutates_args=())
    gradients_operator.register_fake(fake)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, number, ctx.geometry, _ = inputs
        ctx.save_for_backward(x, weight, number)
        ctx.has_bias, ctx.compute_dtype = bias is not None, output.dtype

    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, number = ctx.saved_tensors
        dX = input_gradient(x, dY, weight, ctx.geometry).to(x.dtype) if ctx.needs_input_grad[0] else None
        dW = db = None
        if any(ctx.needs_input_grad[1:3]):
            dW, db = gradients_operator(x.to(ctx.compute_dtype), dY, weight, number, ctx.geometry, ctx.has_bias,
                                        not ctx.needs_input_grad[1])
        return dX, dW if ctx.needs_input_grad[1] else None, db if ctx.has_bias else None, None, None, None

    operator.register_autograd(backward, setup_context=setup_context)


_register(
    "linear", _linear,
    lambda layer, x, dY, weight, geometry, has_bias: linear.gradients(layer, x, dY, True, has_bias),
    lambda x, dY, weight, geometry: dY @ weight.to(dY.dtype))
_register(
    "convolution", _convolution,
    lambda layer, x, dY, weight, geometry, has_bias: convolution.gradients(
        layer, x, weight, dY, convolution.Geometry.of(geometry), (False, True, has_bias))[1:],
    lambda x, dY, weight, geometry: convolution.gradients(
        None, x.to(dY.dtype), weight, dY, convolution.Geometry.of(geometry), (True, False, False))[0])
_register(
    "scale_offset", _scale_offset,
    lambda layer, x, dY, weight, geometry, has_bias: scale_offset.gradients(
        layer, x, weight, dY, geometry[0], (True, has_bias), (True, has_bias)),
    lambda x, dY, weight, geometry: scale_offset.input_gradient(x, weight, dY, geometry[0]))
