"""Supported layers: conversion of the input and the output derivative of each into rows.

Letters: V backpropagated vectors, M leading dimension of a layer's input (N samples, or N k with k
rows each), T positions of a sample, I inputs, O outputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ngsgd.curvature.forms.grad_forms import EmbeddingGrad, OuterProduct, RowSum
from ngsgd.curvature.forms.layer_inputs import DenseInputs, Inputs, Patches
from ngsgd.errors import ConfigError

_PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}

UseShare = OuterProduct | RowSum | EmbeddingGrad


class Kind(Protocol):
    """Interface of the use of parameters by one layer; contains shapes only."""

    def derivative_rows(self, e_VM: Tensor, num_samples: int) -> Tensor:
        """Return V x N x T x O."""

    def weight_share(self, x_M: Tensor, e_VNTO: Tensor) -> UseShare:
        """Return the factored gradient of the weight."""


@dataclass(frozen=True)
class Affine:
    """y = W x + b over the last dimension.

    Dimensions between the first and the last are positions.
    """

    def inputs(self, x_M: Tensor, num_samples: int) -> Inputs:
        """Return the input rows."""
        return DenseInputs(x_M.reshape(num_samples, -1, x_M.shape[-1]))

    def derivative_rows(self, e_VM: Tensor, num_samples: int) -> Tensor:
        return e_VM.reshape(len(e_VM), num_samples, -1, e_VM.shape[-1])

    def weight_share(self, x_M: Tensor, e_VNTO: Tensor) -> UseShare:
        return OuterProduct(self.inputs(x_M, e_VNTO.shape[1]), e_VNTO)


@dataclass(frozen=True)
class Convolution:
    """An affine layer over patches."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    # before and after, of each dimension
    padding: tuple[tuple[int, int], ...]
    mode: str
    groups: int

    def inputs(self, x_M: Tensor, num_samples: int) -> Inputs:
        """Return the input rows, computed on demand."""
        return Patches(x_M, self.kernel, self.stride, self.dilation, self.padding, num_samples, self.mode)

    def derivative_rows(self, e_VM: Tensor, num_samples: int) -> Tensor:
        e_VMTO = e_VM.flatten(3).transpose(2, 3)
        if len(e_VMTO[0]) == num_samples:
            return e_VMTO
        return e_VMTO.reshape(len(e_VM), num_samples, -1, e_VM.shape[2])

    def weight_share(self, x_M: Tensor, e_VNTO: Tensor) -> UseShare:
        return OuterProduct(self.inputs(x_M, e_VNTO.shape[1]), e_VNTO, self.groups)


@dataclass(frozen=True)
class ScaleOffset:
    """Scale and offset after a normalization, along dimension 1 or along the last ones."""

    # the normalization without scale and offset
    normalise: Callable[[Tensor], Tensor]
    # number of last dimensions of the parameters; 0: dimension 1
    num_last: int

    def derivative_rows(self, e_VM: Tensor, num_samples: int) -> Tensor:
        if self.num_last == 0:
            rows = e_VM.movedim(2, -1)
            return rows.reshape(len(e_VM), num_samples, -1, rows.shape[-1])
        return e_VM.reshape(len(e_VM), num_samples, -1, e_VM.shape[-self.num_last:].numel())

    def weight_share(self, x_M: Tensor, e_VNTO: Tensor) -> UseShare:
        xhat_1NTO = self.derivative_rows(self.normalise(x_M)[None], e_VNTO.shape[1])
        return RowSum(e_VNTO * xhat_1NTO)


@dataclass(frozen=True)
class Table:
    """An embedding."""

    num_rows: int
    # row without gradient
    padding_index: int | None

    def derivative_rows(self, e_VM: Tensor, num_samples: int) -> Tensor:
        return e_VM.reshape(len(e_VM), num_samples, -1, e_VM.shape[-1])

    def weight_share(self, x_M: Tensor, e_VNTO: Tensor) -> UseShare:
        index_NT = x_M.reshape(e_VNTO.shape[1], -1)
        if self.padding_index is not None:
            e_VNTO = e_VNTO * (index_NT != self.padding_index)[..., None]
        return EmbeddingGrad(index_NT, e_VNTO, self.num_rows)


def kind_of(layer: nn.Module) -> Kind | None:
    """Return how the layer uses its parameters; None if it is not supported.

    A subclass or an object counts as its base class unless it overrides `forward`. Layers of
    `ngsgd.NGSGD` compute the same outputs as torch's layers.
    """
    module: Any = layer
    plain = None if "forward" in vars(layer) else _plain_class(type(layer))
    if plain is nn.Linear or has_transposed_weight(layer):
        return Affine()
    if plain in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return _convolution(module)
    if plain is nn.LayerNorm:
        return ScaleOffset(lambda x: nn.functional.layer_norm(x, module.normalized_shape, eps=module.eps), module.weight.ndim)
    if plain is nn.RMSNorm:
        return ScaleOffset(lambda x: nn.functional.rms_norm(x, module.normalized_shape, eps=module.eps), module.weight.ndim)
    if plain is nn.GroupNorm:
        return ScaleOffset(lambda x: nn.functional.group_norm(x, module.num_groups, eps=module.eps), 0)
    if plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        # Read now, because the mode may change before the derivative arrives.
        of_minibatch = normalizes_over_minibatch(module)
        normalize = functools.partial(_batch_normalized, module, of_minibatch=of_minibatch)
        return ScaleOffset(normalize, 0)
    if plain is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse:
        return Table(module.num_embeddings, module.padding_idx)
    return None


def has_transposed_weight(layer: nn.Module) -> bool:
    """Return whether the layer is Conv1D of Hugging Face (GPT-2).

    Affine with a weight of inputs x outputs.
    """
    kind = type(layer)
    return (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")


_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d,
            nn.BatchNorm3d, nn.Embedding)


def _plain_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    for plain in _CLASSES:
        if issubclass(kind, plain) and (kind.forward is plain.forward or getattr(kind, "plain_class", None) is plain):
            return plain
    return None


def _convolution(layer: Any) -> Convolution:
    if layer.padding == "same":
        totals = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    elif layer.padding == "valid":
        padding = ((0, 0),) * len(layer.kernel_size)
    else:
        padding = tuple((side, side) for side in layer.padding)
    return Convolution(layer.kernel_size, layer.stride, layer.dilation, padding, _PADDING_MODES[layer.padding_mode], layer.groups)


def normalizes_over_minibatch(layer: nn.Module) -> bool:
    """Return whether the layer is a BatchNorm that will use minibatch statistics."""
    return (isinstance(layer, nn.modules.batchnorm._BatchNorm)
            and (layer.training or layer.running_mean is None))


def _batch_normalized(layer: Any, x: Tensor, *, of_minibatch: bool) -> Tensor:
    """Normalize x without scale and offset."""
    if of_minibatch:
        return nn.functional.batch_norm(x, None, None, training=True, eps=layer.eps)
    # x is in at least float32.
    statistics = (layer.running_mean.to(x.dtype), layer.running_var.to(x.dtype))
    return nn.functional.batch_norm(x, *statistics, eps=layer.eps)


def refuse_coupled(layer: nn.Module, name: str) -> None:
    """Raise ConfigError for a normalization over the minibatch, which mixes its samples."""
    instance = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats and layer.training
    if normalizes_over_minibatch(layer) or instance:
        # Excluding it with layers= would not help: it mixes the samples of the others.
        kind = type(layer).__name__
        raise ConfigError(f"layer {name or kind} ({kind}) normalizes over the minibatch, so "
                          "per-sample gradients do not exist; call its eval() before the forward "
                          "pass, which uses its running statistics, or collect only Kronecker "
                          "factors (kfac, kflr, kfac_emp).")


@torch.no_grad()
def upcast(x: Tensor) -> Tensor:
    """Convert to at least float32: half precision lacks digits and range for squares."""
    return x if x.dtype in (torch.float32, torch.float64) or not x.is_floating_point() else x.float()


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Keep squares and factors in float32 if backward is called inside autocast."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
