"""A call of a layer, and the derivatives at its output.

Letters: V backpropagated vectors, M leading dimension of an input, N samples, T positions of a
sample, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngsgd.curvature.forms.grad_forms import OuterProduct, RowSum
from ngsgd.curvature.forms.layer_inputs import Inputs
from ngsgd.curvature.layers import Kind, UseShare
from ngsgd.errors import ConfigError


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
        """Return the rows that the weight multiplies, N x T x I.

        Frames, or patches of a convolution.
        """
        return self.inputs().rows(0, self.num_samples)

    def inputs(self) -> Inputs:
        """Return the input rows, computed on demand; ConfigError for a layer that is not affine."""
        if not hasattr(self.call.kind, "inputs"):
            raise ConfigError(f"layer {self.layer} is not affine and has no input rows; use its "
                              "shares.")
        inputs: Inputs = self.call.kind.inputs(self.input, self.num_samples)
        return inputs

    @property
    def has_input_rows(self) -> bool:
        """Whether the layer is affine, with one weight for complete input rows."""
        return hasattr(self.call.kind, "inputs") and getattr(self.call.kind, "groups", 1) == 1

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
            weight = None if self.call.weight is None else shares[self.call.weight]
            shares[self.call.bias] = RowSum(e_VNTO,
                                            weight if isinstance(weight, OuterProduct) else None)
        return shares


def disagreement(layer: str, num_samples: int, others: int) -> str:
    """Return the message about a layer with another number of samples."""
    return (f"layer {layer} has {num_samples} samples, and other layers {others}. Give "
            "num_samples= if the rows of each sample are adjacent there, or give the layer an "
            "input for each sample if it runs once for the complete minibatch.")
