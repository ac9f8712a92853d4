"""Affine layers under plain `SGD` on processors where `ngsgd.ops.gemm` is faster than torch's GEMM.

NG-SGD uses the same GEMM in the forward and the backward pass. A comparison of the two optimizers
therefore compares methods rather than libraries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.ops import gemm
from ngsgd.ops.tensors import without_autocast
from ngsgd.optim.layers.base import OWNER, NaturalGradientLayer, asked_for, is_plain_context
from ngsgd.optim.layers.common import cast, compute_dtype
from ngsgd.optim.layers.linear import gradients


class _PlainAffine(torch.autograd.Function):
    """`torch.nn.functional.linear` with the GEMM of `ngsgd.ops.gemm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        # Save the inputs themselves: a backward pass that is differentiated needs their graph.
        ctx.save_for_backward(x, weight)
        x, weight, bias = cast(dtype, x, weight, bias)
        return gemm.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with without_autocast(dY.device.type):
            # Under create_graph, `gemm` uses torch for tensors that require a gradient.
            dX = gemm.input_gradient(dY, weight) if ctx.needs_input_grad[0] else None
            dW, db = gradients(None, x, dY, asked_for(ctx, 1)[0], ctx.needs_input_grad[2])
        return (*cast(x.dtype, dX), *cast(weight.dtype, dW, db), None)


class FastLinear(NaturalGradientLayer, nn.Linear):
    """Replacement of an `nn.Linear` while `SGD` owns it; copies and pickles are the plain layer."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        # A function mode around `nn.functional.linear`, as preconditioners use, must see the call.
        """Return x W^T + b."""
        if (not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_plain_context(input)
                or torch._C._is_torch_function_mode_enabled()):
            return self.plain_forward(input)  # type: ignore[no-any-return]
        return _PlainAffine.apply(input, self.weight, self.bias,  # type: ignore[no-any-return,no-untyped-call]
                                  compute_dtype(input))


def attach_fast_linear(layers: Iterable[nn.Module], owner: object) -> list[nn.Linear]:
    """Change the class of each `nn.Linear` in place if the other GEMM is faster.

    Returns:
        The layers that `owner` owns from now on.
    """
    if not gemm.is_faster():
        return []
    # Exact classes, because a subclass may compute something else.
    found = [layer for layer in layers if type(layer) in (nn.Linear, FastLinear)]
    for layer in found:
        layer.__class__ = FastLinear
        layer.__dict__[OWNER] = owner
    return found  # type: ignore[return-value]


def detach_fast_linear(layers: Iterable[nn.Module], owner: object) -> None:
    """Restore the plain layers that `owner` still owns; a later optimizer may own some of them."""
    for layer in layers:
        if layer.__dict__.get(OWNER) is owner:
            del layer.__dict__[OWNER]
            if type(layer) is FastLinear:
                layer.__class__ = nn.Linear  # type: ignore[assignment]
