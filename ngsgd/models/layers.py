"""Building blocks of acoustic models that torch lacks; N rows, D dimension, G groups."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.ops import nonlinearities


class Window(NamedTuple):
    """Composition of an input row: concatenated frames with context, then side values."""

    left_context: int     # frames
    right_context: int    # frames
    feature_dim: int      # of one frame
    side_dim: int = 0  # values that are not spliced, such as an i-vector, at the end of the row

    @property
    def num_inputs(self) -> int:
        return (self.left_context + 1 + self.right_context) * self.feature_dim + self.side_dim


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the training examples that a model needs (`ngsgd.models.statistics`)."""

    class_counts: tuple[float, ...] = ()  # frames of each class
    input_transform: Tensor | None = None       # outputs x inputs + 1


class _PNorm(torch.autograd.Function):
    """y and dy/dx, bitwise identical with and without a graph for the second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        y = nonlinearities.p_norm(x, group)
        ctx.save_for_backward(x, y)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        dX: Tensor = _PNormGradient.apply(x, y, dY, ctx.group)  # type: ignore[no-untyped-call]
        return dX, None


class _PNormGradient(torch.autograd.Function):
    """dX = x dY / y, for each group, with derivatives in differentiable torch operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dY: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(x, y, dY)
        ctx.group = group
        return nonlinearities.p_norm_gradient(x, y, dY, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, y, dY = ctx.saved_tensors
        groups, g_groups = x.unflatten(-1, (-1, ctx.group)), g.unflatten(-1, (-1, ctx.group))
        inverse = torch.where(y > 0.0, 1.0 / y, 0.0)
        moved = (groups * g_groups).sum(dim=-1) * inverse
        return (g_groups * (dY * inverse).unsqueeze(-1)).flatten(-2), -moved * dY * inverse, moved, None


class _Renormalize(torch.autograd.Function):
    """The same for row norms; it saves x instead of the norms, for the second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target_rms: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.target_rms = target_rms
        return nonlinearities.renormalize(x, target_rms)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dX: Tensor = _RenormalizeGradient.apply(x, dY, ctx.target_rms)  # type: ignore[no-untyped-call]
        return dX, None


class _RenormalizeGradient(torch.autograd.Function):
    """dX = r dY - c (x^T dY) x with r = (x^T x / s)^(-1/2) and c = r^3 / s for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dY: Tensor, target_rms: float) -> Tensor:
        ctx.save_for_backward(x, dY)
        ctx.target_rms = target_rms
        return nonlinearities.renormalize_gradient(x, dY, target_rms)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, dY = ctx.saved_tensors
        r, c = nonlinearities.inverse_rms(x, ctx.target_rms)
        of_g, of_dY, with_g = ((a * b).sum(dim=-1, keepdim=True) for a, b in ((x, g), (x, dY), (dY, g)))
        # dr/dx = -c x and dc/dx = -3 c^2 / r x
        by_x = (3.0 * c * c / r * of_g * of_dY - c * with_g) * x - c * (of_g * dY + of_dY * g)
        return by_x.to(x.dtype), (r * g - c * of_g * x).to(x.dtype), None


class PNorm(nn.Module):
    """P-norm nonlinearity with p = 2: y_j = (sum over group j of |x_i|^2)^(1/2).

    Input (..., D), output (..., D / group); groups are consecutive. The derivative is 0 if the
    output is 0. Source: Zhang et al. 2014.
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
    """Scale each row to root mean square `target_rms`, so that activations do not grow."""

    def __init__(self, target_rms: float = 1.0) -> None:
        super().__init__()
        self.target_rms = target_rms

    def forward(self, x_ND: Tensor) -> Tensor:
        if not x_ND.is_cpu:
            # One kernel of torch in each direction, which adds the floor; 1e-20 has no effect on
            # any row.
            of_one: Tensor = nn.functional.rms_norm(x_ND, x_ND.shape[-1:], None, nonlinearities.MIN_MEAN_SQUARE)
            return of_one if self.target_rms == 1.0 else of_one * self.target_rms
        y_ND: Tensor = _Renormalize.apply(x_ND, self.target_rms)  # type: ignore[no-untyped-call]
        return y_ND

    def extra_repr(self) -> str:
        return f"target_rms={self.target_rms}"


class BatchNorm(nn.BatchNorm1d):
    """Kaldi's batch normalization: eps 1e-3, no scale and offset, decay 0.8 per minibatch.

    Accepts any leading dimensions; the last one is normalized over all rows. A minibatch of a
    single row, which has no variance, is normalized with the current statistics and does not update
    them.
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
    """y = A x + b with constants, which are neither parameters nor part of the state dict."""

    weight: Tensor
    bias: Tensor

    def __init__(self, transform: Tensor) -> None:
        """Create the layer from outputs x inputs + 1, the offset last, as in Kaldi."""
        super().__init__()
        self.register_buffer("weight", transform[:, :-1].float().contiguous(), persistent=False)
        self.register_buffer("bias", transform[:, -1].float().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class FixedScale(nn.Module):
    """y = s * x elementwise, with constant s."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def normalization(config: ModelConfig, dim: int) -> nn.Module:
    """Return the normalization after a nonlinearity of `dim` values."""
    return BatchNorm(dim) if config.normalize == "batchnorm" else Renormalize()


Layer = OrderedDict[str, nn.Module]  # modules of one hidden layer, by their names in the model


def dnn_layers(config: ModelConfig, num_inputs: int) -> tuple[list[Layer], int]:
    """Return (hidden layers, outputs of the last)."""
    layers, width = [], num_inputs
    for number in range(1, config.num_layers + 1):
        layer: Layer = OrderedDict()
        layer[f"affine{number}"] = nn.Linear(width, config.hidden_dim)
        layer[f"nonlinearity{number}"] = nn.ReLU() if config.kind == "relu" else PNorm(config.pnorm_group)
        width = config.hidden_dim if config.kind == "relu" else config.hidden_dim // config.pnorm_group
        layer[f"{config.normalize}{number}"] = normalization(config, width)
        if config.dropout_schedule:
            # Each job sets the proportion from the schedule.
            layer[f"dropout{number}"] = nn.Dropout(0.0)
        layers.append(layer)
    return layers, width


@torch.no_grad()
def initialize(layers: Iterable[nn.Module], generator: torch.Generator) -> None:
    """Initialize as in Kaldi (C.7): weights of standard deviation 1/sqrt(inputs), biases of 1."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 1.0 / math.sqrt(module.in_features), generator=generator)
                if module.bias is not None:
                    module.bias.normal_(0.0, 1.0, generator=generator)


@torch.no_grad()
def zero(output: nn.Linear) -> None:
    """Set the output layer to zero, for equal probabilities."""
    output.weight.zero_()
    output.bias.zero_()
