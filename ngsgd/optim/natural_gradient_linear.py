"""A Linear layer whose backward pass yields the natural-gradient direction for its weight and bias.

The gradient is formed once, from preconditioned rows, inside the backward pass; hooks that recompute it would pay for a
second product of the size of the layer.  Letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ngsgd.preconditioners.online import OnlineNaturalGradient


class LayerPreconditioner:
    """Kronecker-factored natural gradient of one affine layer: input rows with the 1 appended, and derivative rows."""

    def __init__(self, input_side: OnlineNaturalGradient, output_side: OnlineNaturalGradient) -> None:
        self.input_side = input_side
        self.output_side = output_side

    def gradient(self, X_NI: Tensor, dY_NO: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """(weight gradient O x I, bias gradient O or None), preconditioned on both sides; section 4 of the paper."""
        if has_bias:
            X_NI = torch.cat([X_NI, X_NI.new_ones(len(X_NI), 1)], dim=1)
        Xhat_NI, input_scale = self.input_side.precondition(X_NI)
        dYhat_NO, output_scale = self.output_side.precondition(dY_NO)
        gradient_OI = (dYhat_NO.T @ Xhat_NI).mul_(input_scale * output_scale)
        return (gradient_OI[:, :-1], gradient_OI[:, -1]) if has_bias else (gradient_OI, None)


class _Affine(torch.autograd.Function):
    """y = x W^T + b, with the preconditioned gradient in place of the plain one."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerPreconditioner) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.layer = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable  # the gradient of a natural gradient is not what a second backward would return: make it raise
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dX = dY @ weight if ctx.needs_input_grad[0] else None
        dW = db = None
        if ctx.needs_input_grad[1]:
            dW, db = ctx.layer.gradient(x.reshape(-1, x.shape[-1]), dY.reshape(-1, dY.shape[-1]), ctx.has_bias)
        return dX, dW, db, None


class NaturalGradientLinear(nn.Linear):
    """What `NGSGD` turns an `nn.Linear` into: same parameters, same names, same forward pass."""

    preconditioner: LayerPreconditioner

    @staticmethod
    def attach(layer: nn.Linear, preconditioner: LayerPreconditioner) -> None:
        """Changes the class of `layer` in place; `torch.nn.utils.parametrize` does the same."""
        layer.__class__ = NaturalGradientLinear
        layer.__dict__["preconditioner"] = preconditioner

    def detach(self) -> None:
        """Back to a plain nn.Linear."""
        del self.__dict__["preconditioner"]
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        if not torch.is_grad_enabled():
            return nn.functional.linear(input, self.weight, self.bias)
        return _Affine.apply(input, self.weight, self.bias, self.preconditioner)  # type: ignore[no-any-return,no-untyped-call]
