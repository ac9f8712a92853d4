"""One call of one layer, and with it the derivatives that came back.

Letters: V backpropagated vectors, M leading dimension of an input, N samples, T positions of a sample, I inputs, O outputs.
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

    # its name in the model; of an LSTM's products "lstm.ih_l0", "lstm.hh_l0" ..
    layer: str
    # of the call of this layer since the capture began, from 0
    number: int
    kind: Kind
    # names of the parameters; None: there is none, or it takes no gradient
    weight: str | None
    bias: str | None
    # as the layer got it, detached; samples first
    input: Tensor
    # of the input's storage, so that later changes in place are seen
    version: int
    output_shape: torch.Size
    # which call of the whole model it belongs to, from 0; -1: its layers were called one by one
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
        """The layer's name."""
        return self.call.layer

    def input_rows(self) -> Tensor:
        """N x T x I, what an affine layer multiplies its weight by: frames, patches of a convolution."""
        return self.inputs().rows(0, self.num_samples)

    def inputs(self) -> Inputs:
        """The same, made on demand; ConfigError for a layer that is not affine."""
        if not hasattr(self.call.kind, "inputs"):
            raise ConfigError(f"layer {self.layer} is not affine and has no input rows; ask for its shares.")
        inputs: Inputs = self.call.kind.inputs(self.input, self.num_samples)
        return inputs

    @property
    def has_input_rows(self) -> bool:
        """The layer is affine, with one weight for all of an input row."""
        return hasattr(self.call.kind, "inputs") and getattr(self.call.kind, "groups", 1) == 1

    def derivative_rows(self) -> Tensor:
        """V x N x T x O."""
        return self.call.kind.derivative_rows(self.derivatives_VM, self.num_samples)

    def shares(self) -> dict[str, UseShare]:
        """What the gradient of each parameter is made of, by name."""
        e_VNTO = self.derivative_rows()
        shares: dict[str, UseShare] = {}
        if self.call.weight is not None:
            shares[self.call.weight] = self.call.kind.weight_share(self.input, e_VNTO)
        if self.call.bias is not None:
            weight = None if self.call.weight is None else shares[self.call.weight]
            shares[self.call.bias] = RowSum(e_VNTO,
                                            weight if isinstance(weight, OuterProduct) else None)
        return shares
