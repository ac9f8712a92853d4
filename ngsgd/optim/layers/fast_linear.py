"""Affine layers under plain `SGD` on processors where `ngsgd.ops.gemm` is faster than torch's own GEMM.

NG-SGD's layers use the same GEMM in the forward and the backward pass, so a comparison of the two optimizers compares
methods, and not libraries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.ops import gemm
from ngsgd.optim.layers.base import OWNER, NaturalGradientLayer, asked_for, is_plain_context
from ngsgd.optim.layers.common import cast, compute_dtype, without_autocast
from ngsgd.optim.layers.linear import gradients


class _PlainAffine(torch.autograd.Function):
    """`torch.nn.functional.linear` with the products of `ngsgd.ops.gemm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        # the inputs themselves are saved: a backward pass that is differentiated needs their graph
        ctx.save_for_backward(x, weight)
        x, weight, bias = cast(dtype, x, weight, bias)
        return gemm.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with without_autocast(dY.device.type):
            # under create_graph, `gemm` leaves tensors that require a gradient to torch
            dX = gemm.input_gradient(dY, weight) if ctx.needs_input_grad[0] else None
            dW, db = gradients(None, x, dY, asked_for(ctx, 1)[0], ctx.needs_input_grad[2])
        return (*cast(x.dtype, dX), *cast(weight.dtype, dW, db), None)


class FastLinear(NaturalGradientLayer, nn.Linear):
    """What `SGD` turns an `nn.Linear` into while it owns it; copies and pickles are the plain layer."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        # a mode around `nn.functional.linear`, as that of preconditioners, must see the call
        if (not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_plain_context(input)
                or torch._C._is_torch_function_mode_enabled()):
            return self.plain_forward(input)  # type: ignore[no-any-return]
        return _PlainAffine.apply(input, self.weight, self.bias,  # type: ignore[no-any-return,no-untyped-call]
                                  compute_dtype(input))


def attach_fast_linear(layers: Iterable[nn.Module], owner: object) -> list[nn.Linear]:
    """Change the class of each `nn.Linear` in place where the other GEMM is faster; return those that `owner` now owns."""
    if not gemm.is_faster():
        return []
    # exact classes: a subclass may compute something else
    found = [layer for layer in layers if type(layer) in (nn.Linear, FastLinear)]
    for layer in found:
        layer.__class__ = FastLinear
        layer.__dict__[OWNER] = owner
    return found  # type: ignore[return-value]


def detach_fast_linear(layers: Iterable[nn.Module], owner: object) -> None:
    """Restore the plain layers that `owner` still owns; a later optimizer may have taken some over."""
    for layer in layers:
        if layer.__dict__.get(OWNER) is owner:
            del layer.__dict__[OWNER]
            if type(layer) is FastLinear:
                layer.__class__ = nn.Linear  # type: ignore[assignment]
