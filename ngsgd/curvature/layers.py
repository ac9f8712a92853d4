"""Supported layers, and their calls: conversion of inputs and output derivatives into rows.

Letters: V backpropagated vectors, M leading dimension of a layer's input (N samples, or N k with k
rows each), T positions of a sample, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature.forms.grad_forms import DenseInputs, EmbeddingGrad, Inputs, OuterProduct, Patches, RowSum
from ngsgd.errors import ConfigError

_PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}

UseShare = OuterProduct | RowSum | EmbeddingGrad


@dataclass(frozen=True)
class Affine:
    """y = W x + b over the last dimension; those between the first and the last are positions."""

    def inputs(self, x_M: Tensor, num_samples: int) -> Inputs:
        """Return the input rows."""
        return DenseInputs(x_M.reshape(num_samples, -1, x_M.shape[-1]))

    def derivative_rows(self, e_VM: Tensor, num_samples: int) -> Tensor:
        """Return V x N x T x O."""
        return e_VM.reshape(len(e_VM), num_samples, -1, e_VM.shape[-1])

    def weight_share(self, x_M: Tensor, e_VNTO: Tensor) -> UseShare:
        """Return the factored gradient of the weight."""
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


# how one layer uses its parameters; contains shapes only
Kind = Affine | Convolution | ScaleOffset | Table


def kind_of(layer: nn.Module) -> Kind | None:
    """Return how the layer, or a subclass with its `forward`, uses its parameters, or None."""
    module: Any = layer
    kind = type(layer)
    plain = None if "forward" in vars(layer) else next(
        (one for one in _CLASSES if issubclass(kind, one)
         and (kind.forward is one.forward or getattr(kind, "plain_class", None) is one)), None)
    if plain is nn.Linear or has_transposed_weight(layer):
        return Affine()
    if plain in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return _convolution(module)
    if plain in (nn.LayerNorm, nn.RMSNorm):
        normalize = nn.functional.layer_norm if plain is nn.LayerNorm else nn.functional.rms_norm
        return ScaleOffset(lambda x: normalize(x, module.normalized_shape, eps=module.eps), module.weight.ndim)
    if plain is nn.GroupNorm:
        return ScaleOffset(lambda x: nn.functional.group_norm(x, module.num_groups, eps=module.eps), 0)
    if plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        # Read now, because the mode may change before the derivative arrives.
        if normalizes_over_minibatch(module):
            return ScaleOffset(lambda x: nn.functional.batch_norm(x, None, None, training=True, eps=module.eps), 0)
        # x is in at least float32.
        return ScaleOffset(lambda x: nn.functional.batch_norm(
            x, module.running_mean.to(x.dtype), module.running_var.to(x.dtype), eps=module.eps), 0)
    if plain is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse:
        return Table(module.num_embeddings, module.padding_idx)
    return None


def has_transposed_weight(layer: nn.Module) -> bool:
    """Return whether the layer is Conv1D of Hugging Face, with a weight of inputs x outputs."""
    kind = type(layer)
    return (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")


_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d,
            nn.BatchNorm3d, nn.Embedding)


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
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None)


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


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of one layer in a forward pass."""

    # name in the model; products of an LSTM are "lstm.ih_l0", "lstm.hh_l0" ..
    layer: str
    # index among the calls of this layer in the capture, from 0
    number: int
    kind: Kind
    # names of the parameters; None if missing or frozen
    weight: str | None
    bias: str | None
    # detached input of the layer; samples first
    input: Tensor
    # storage version of the input, to detect in-place changes
    version: int
    output_shape: torch.Size
    # index of the model call, from 0; -1: layers were called directly
    forward: int = -1


@dataclass(frozen=True, eq=False)
class Record:
    """A call with the derivatives of one or more scalars with respect to its output."""

    call: LayerCall
    num_samples: int
    input: Tensor           # M x ..
    # V x M x .., M the leading dimension of the output; V = 1 for the derivative of the loss
    derivatives_VM: Tensor

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.call.layer

    def input_rows(self) -> Tensor:
        """Return the rows that the weight multiplies, N x T x I: frames, or patches."""
        return self.inputs().rows(0, self.num_samples)

    def inputs(self) -> Inputs:
        """Return the input rows, computed on demand; ConfigError for a layer that is not affine."""
        if not hasattr(self.call.kind, "inputs"):
            raise ConfigError(f"layer {self.layer} is not affine and has no input rows; use its "
                              "shares.")
        inputs: Inputs = self.call.kind.inputs(self.input, self.num_samples)
        return inputs

    def derivative_rows(self) -> Tensor:
        """Return V x N x T x O."""
        return self.call.kind.derivative_rows(self.derivatives_VM, self.num_samples)

    def shares(self) -> dict[str, UseShare]:
        """Return the factored gradient of each parameter, by name."""
        e_VNTO = self.derivative_rows()
        shares: dict[str, UseShare] = {}
        if self.call.weight is not None:
            shares[self.call.weight] = self.call.kind.weight_share(self.input, e_VNTO)
        if self.call.bias is not None:
            shares[self.call.bias] = RowSum(e_VNTO)
        return shares


def disagreement(layer: str, num_samples: int, others: int) -> str:
    """Return the message about a layer with another number of samples."""
    return (f"layer {layer} has {num_samples} samples, and other layers {others}. Give "
            "num_samples= if the rows of each sample are adjacent there, or give the layer an "
            "input for each sample if it runs once for the complete minibatch.")
