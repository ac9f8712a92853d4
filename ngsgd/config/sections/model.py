"""Options of the network, or of a custom task that is trained instead of a speech model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ngsgd.config.option import Section, option

_OURS = "!_target_"
_TDNN_OFFSETS = "-2,-1,0,1,2 -1,1 -2,2 0"
# prefix of the name of a task from a Python program, instead of module:function
FROM_PYTHON = "python:"


@dataclass(frozen=True)
class ModelConfig(Section):
    """The acoustic model: affine layers with nonlinearity and normalization, or a custom module."""

    kind: Literal["relu", "pnorm", "tdnn", "tdnnf"] = option(
        "relu", "architecture; relu, pnorm: feed-forward network; tdnn: time-delay network; tdnnf: "
        "factored time-delay network", used=_OURS,
        choices={"pnorm": "P-norm network, p = 2, as in the paper; each group of pnorm_group values has one output",
                 "tdnn": "Time-delay network: each layer reads frames at several offsets",
                 "tdnnf": "Factored time-delay network with semi-orthogonal bottlenecks and bypass connections"})
    # tdnn and tdnnf: their offsets are for 4 layers, also where a recipe has other numbers
    num_layers: int = option(4, "number of hidden layers", low=1, high=64, used=_OURS, default_of_kind={"tdnn": 4, "tdnnf": 4})
    hidden_dim: int = option(256, "output dimension of each hidden affine layer", low=2,
                             used=_OURS, default_of_kind={"pnorm": 1000})
    pnorm_group: int = option(5, "number of inputs of each p-norm unit; must divide hidden_dim",
                              low=2, used=f"{_OURS} & kind=pnorm")
    normalize: Literal["renormalize", "batchnorm"] = option(
        "renormalize", "normalization after each nonlinearity; renormalize: unit root mean square; "
        "batchnorm: Kaldi's batch normalization, without scale and offset", used=_OURS,
        default_of_kind={"tdnn": "batchnorm", "tdnnf": "batchnorm"})
    dropout_schedule: str = option(
        "", "dropout probability over the fraction of data processed, in Kaldi's notation, such as "
        "0,0@0.2,0.3@0.5,0; empty: no dropout")
    tdnn_offsets: str = option(
        _TDNN_OFFSETS, "frame offsets of the input of each layer, separated by commas, and by a "
        "space between layers; their sums must fit into the context of the examples", used=f"{_OURS} & kind=tdnn|tdnnf",
        default_of_kind={"tdnn": _TDNN_OFFSETS, "tdnnf": "-2,-1,0,1,2 -1,0,1 -1,0,1 -1,0,1"})
    bottleneck_dim: int = option(64, "number of rows of the semi-orthogonal factors", low=1, used=f"{_OURS} & kind=tdnnf")
    input_transform: Literal["none", "lda"] = option(
        "none", "fixed first layer; lda: linear discriminant analysis of the training examples (C.6)")
    prior_scale_power: float = option(
        0.0, "exponent of the class priors that scale the outputs before the softmax (nnet2: "
        "-0.25); 0: no scaling", low=-1.0, high=0.0)
    num_subclasses: int = option(0, "total number of sub-classes after the split of classes (C.5); 0: no split", low=0)
    add_layers_period: int = option(0, "interval between two new layers (C.7; nnet2: 2); 0: all "
                                    "layers at the start", unit="outer iterations", low=0)
    _target_: str = option("", "package.module:Name of a custom network; empty: architecture in kind")
    args: Mapping[str, Any] | None = option(None, "keyword arguments of the custom network, such "
                                            "as {width: 64}; null: none", used="_target_")
    search_path: str = option("", "folder to import the custom network from; empty: current folder", used="_target_")
    init_scales: Mapping[str, Any] | None = option(
        None, "scales of the initial parameters of layers, such as {affine1: 0.8}; null: all 1")

    @property
    def label(self) -> str:
        """The name of the model in run names."""
        return self._target_.replace(":", ".").rpartition(".")[2] or self.kind

    def layer_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Return `tdnn_offsets` by layer.

        Raises:
            ValueError: a layer's offsets are not rising integers.
        """
        layers = tuple(tuple(int(offset) for offset in layer.split(",")) for layer in self.tdnn_offsets.split())
        if not layers or any(list(layer) != sorted(set(layer)) for layer in layers):
            raise ValueError(self.tdnn_offsets)
        return layers


@dataclass(frozen=True)
class TaskConfig:
    """A custom task that is trained instead of a speech model: model, data and loss."""

    _target_: str = option(
        "", "module:function that returns a custom task (ngsgd.tasks.DatasetTask or another "
        "subclass of Task); empty: speech recognition")
    args: Mapping[str, Any] | None = option(None, "keyword arguments of the function in _target_, "
                                            "such as {width: 64}; null: none", used="_target_")
    search_path: str = option("", "folder to import the module in _target_ from; empty: current folder", used="_target_")

    @property
    def label(self) -> str:
        """The name of the task in run names."""
        return self._target_.replace(":", ".").rpartition(".")[2]

    @property
    def from_python(self) -> str:
        """The name of a task that a Python program passed to `ngsgd.train`; "" for all others."""
        return self._target_.removeprefix(FROM_PYTHON) if self._target_.startswith(FROM_PYTHON) else ""
