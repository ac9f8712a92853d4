"""Building blocks of acoustic models that torch does not have.

Letters: N rows, D dimension, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.ops import nonlinearities


class _PNorm(torch.autograd.Function):
    """Its backward pass can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        y = nonlinearities.p_norm(x, group)
        ctx.save_for_backward(x, y)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return nonlinearities.p_norm_gradient(x, y, dY, ctx.group), None


class _Renormalize(torch.autograd.Function):
    """Likewise; for that it keeps x and not its norms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target_rms: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.target_rms = target_rms
        return nonlinearities.renormalize(x, target_rms)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return nonlinearities.renormalize_gradient(x, dY, ctx.target_rms), None


class PNorm(nn.Module):
    """y_j = (sum over group j of |x_i|^2)^(1/2): the p-norm nonlinearity with p = 2 (Zhang et al. 2014).

    Input (..., D), output (..., D / group); groups are consecutive.  The derivative is 0 where the output is 0.
    """

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _PNorm.apply(x, self.group)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        return f"group={self.group}"


class Renormalize(nn.Module):
    """Scales each row to root mean square `target_rms`; keeps p-norm and ReLU activations from growing."""

    def __init__(self, target_rms: float = 1.0) -> None:
        super().__init__()
        self.target_rms = target_rms

    def forward(self, x_ND: Tensor) -> Tensor:
        y_ND: Tensor = _Renormalize.apply(x_ND, self.target_rms)  # type: ignore[no-untyped-call]
        return y_ND

    def extra_repr(self) -> str:
        return f"target_rms={self.target_rms}"


class BatchNorm(nn.BatchNorm1d):
    """Kaldi's batch normalisation: eps 1e-3, no scale and offset of its own, statistics that forget by 0.8 per minibatch.

    Any leading dimensions; the last one is normalised over all rows.  A minibatch of a single row, which has no variance,
    is normalised with the statistics so far and does not enter them.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-3, momentum=1.0 - 0.8, affine=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        x_ND = input.reshape(-1, input.shape[-1])
        if self.training and len(x_ND) == 1:
            y_ND = nn.functional.batch_norm(x_ND, self.running_mean, self.running_var, eps=self.eps)
        else:
            y_ND = super().forward(x_ND)
        return y_ND.view(input.shape)


class FixedAffine(nn.Module):
    """y = A x + b with numbers that no training changes: neither parameters nor part of the state dict."""

    weight: Tensor
    bias: Tensor

    def __init__(self, transform: Tensor) -> None:
        """`transform` is (outputs x inputs + 1), the offset last, as Kaldi keeps it."""
        super().__init__()
        self.register_buffer("weight", transform[:, :-1].float().contiguous(), persistent=False)
        self.register_buffer("bias", transform[:, -1].float().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class FixedScale(nn.Module):
    """y = s * x element by element, s fixed."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def normalization(config: ModelConfig, dim: int) -> nn.Module:
    """What follows each nonlinearity of `dim` values."""
    return BatchNorm(dim) if config.normalize == "batchnorm" else Renormalize()
