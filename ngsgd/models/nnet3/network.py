"""Network description that models here and Kaldi's nnet3 share; conversions copy every bit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.errors import ConfigError, DataError
from ngsgd.models.build import build_model
from ngsgd.models.layers import DataStatistics, Window

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AffineParameters:
    """y = W x + b over the concatenated frames at `offsets`."""

    weight: Array
    bias: Array
    offsets: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Layer:
    """A hidden layer."""

    affine: AffineParameters
    nonlinearity: str  # relu or pnorm
    group: int  # pnorm: inputs of each output; relu: 1
    normalize: str  # renormalize or batchnorm, which has the rest
    mean: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    variance: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    count: int = 0  # minibatches in the statistics


@dataclass(frozen=True)
class Network:
    """A complete feed-forward network or TDNN."""

    feature_dim: int
    layers: tuple[Layer, ...]
    output: AffineParameters
    is_tdnn: bool
    transform: AffineParameters | None = None  # fixed transform of the input
    has_softmax: bool = True  # whether a log-softmax follows; lattice-free MMI has none
    side_dim: int = 0  # of the i-vector, which the first affine layer gets after the frames

    def offsets(self) -> list[tuple[int, ...]]:
        """Input frames of each layer, starting with the input transform."""
        first = [self.transform.offsets] if self.transform else []
        return [*first, *(layer.affine.offsets for layer in self.layers)]


def describe(model: nn.Module, config: ModelConfig, window: Window, *, has_softmax: bool = True) -> Network:
    """Convert a trained model; ConfigError, with the reason, if nnet3 has no such component."""
    for what, is_used, reason in (
            ("model._target_", bool(config._target_), "a custom module has layers that nnet3 does not support"),
            ("model.num_subclasses", config.num_subclasses > 0,
             "nnet3 has no component that sums sub-classes inside the logarithm"),
            ("model.kind tdnnf", config.kind == "tdnnf", "bypass and factors of TDNN-F are not written yet"),
            ("model.prior_scale_power", config.prior_scale_power != 0.0,
             "fixed scales before the softmax are not written yet")):
        if is_used:
            raise ConfigError(f"{what} cannot be exported: {reason}; train without it.")
    state = {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}
    is_tdnn = config.kind == "tdnn"
    whole = tuple(range(-window.left_context, window.right_context + 1))
    offsets = list(config.layer_offsets()) if is_tdnn else [whole, *[(0,)] * (config.num_layers - 1)]
    transform = None
    if config.input_transform != "none":
        buffers = dict(model.named_buffers())
        [prefix] = {name.rpartition(".")[0] for name in buffers if name.startswith("input_transform")}
        transform = AffineParameters(buffers[f"{prefix}.weight"].cpu().numpy(), buffers[f"{prefix}.bias"].cpu().numpy(), offsets[0])
        offsets[0] = (0,)
    layers = []
    for number, of_layer in enumerate(offsets, start=1):
        name, norm = _names(config.kind, number, config.normalize)
        affine = AffineParameters(state[f"{name}.weight"], state[f"{name}.bias"], of_layer)
        kind, group = ("pnorm", config.pnorm_group) if config.kind == "pnorm" else ("relu", 1)
        layer = Layer(affine, kind, group, config.normalize)
        layers.append(layer if config.normalize == "renormalize" else replace(
            layer, mean=state[f"{norm}.running_mean"], variance=state[f"{norm}.running_var"],
            count=int(state[f"{norm}.num_batches_tracked"])))
    output = AffineParameters(state["output.weight"], state["output.bias"])
    return Network(window.feature_dim, tuple(layers), output, is_tdnn, transform, has_softmax, window.side_dim)


def _names(kind: str, number: int, normalize: str) -> tuple[str, str]:
    if kind == "tdnn":
        return f"tdnn{number}.affine", f"tdnn{number}.rest.normalize"
    return f"affine{number}", f"{normalize}{number}"


@dataclass(frozen=True)
class Rebuilt:
    """A model, and its configuration."""

    model: nn.Module
    config: ModelConfig
    window: Window
    num_classes: int
    transform: Tensor | None = None     # outputs x inputs + 1


def rebuild(network: Network) -> Rebuilt:
    """Create a model with the numbers of the network; DataError if no `model=` has its shape."""
    config = _config_of(network)
    _check_fits(network)
    offsets = network.offsets()
    window = Window(-sum(min(0, layer[0]) for layer in offsets), sum(max(0, layer[-1]) for layer in offsets), network.feature_dim,
                    network.side_dim)
    num_classes, fixed = len(network.output.bias), network.transform
    transform = None if fixed is None else torch.from_numpy(np.column_stack([fixed.weight, fixed.bias]))
    model = build_model(config, window.num_inputs, num_classes, seed=0, window=window,
                        statistics=DataStatistics(input_transform=transform))
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, layer in enumerate(network.layers, start=1):
        affine, norm = _names(config.kind, number, config.normalize)
        arrays |= {f"{affine}.weight": layer.affine.weight, f"{affine}.bias": layer.affine.bias}
        if layer.normalize == "batchnorm":
            arrays |= {f"{norm}.running_mean": layer.mean, f"{norm}.running_var": layer.variance,
                       f"{norm}.num_batches_tracked": np.array(layer.count, np.int64)}
    arrays |= {"output.weight": network.output.weight, "output.bias": network.output.bias}
    state = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in state.items()}:
        raise DataError("The layers of this nnet3 model do not fit together; check that the file is complete.")
    model.load_state_dict(state)
    return Rebuilt(model.eval(), config, window, num_classes, transform)


def _check_fits(network: Network) -> None:
    size, first = network.feature_dim, [network.transform] if network.transform else []
    for number, affine in enumerate([*first, *(layer.affine for layer in network.layers), network.output]):
        inputs = size * len(affine.offsets) + (0 if number else network.side_dim)
        if affine.weight.shape != (len(affine.bias), inputs):
            raise DataError("The layers of this nnet3 model do not fit together: affine component "
                            f"{number + 1} of the chain has {affine.weight.shape[1]} inputs, and "
                            f"{inputs} come from before; check that it is complete.")
        at = number - len(first)
        size = len(affine.bias) // (network.layers[at].group if 0 <= at < len(network.layers) else 1)


def _config_of(network: Network) -> ModelConfig:
    first = network.layers[0]
    for layer in network.layers:
        if (layer.nonlinearity, layer.group, layer.normalize, layer.affine.weight.shape[0]) != (
                first.nonlinearity, first.group, first.normalize, first.affine.weight.shape[0]):
            raise DataError("The hidden layers of this nnet3 model differ in width or kind, and "
                            "models here have one for all.")
    splices = network.offsets()
    kind: Any = "tdnn" if network.is_tdnn else first.nonlinearity
    begin, end = splices[0][0], splices[0][-1]
    is_plain = splices[0] == tuple(range(begin, end + 1)) and begin <= 0 <= end
    if kind != "tdnn" and (any(offsets != (0,) for offsets in splices[1:]) or not is_plain):
        raise DataError("This nnet3 model splices hidden layers, or its input with gaps, which is "
                        "supported for ReLU TDNNs only; name its components tdnn1.affine and so on if it is one.")
    if kind == "tdnn" and first.nonlinearity != "relu":
        raise DataError("This nnet3 model is a TDNN of p-norm layers, and TDNNs here have ReLUs.")
    layers = splices if network.transform is None else [splices[0], *splices[2:]]
    text = " ".join(",".join(map(str, offsets)) for offsets in layers)
    return ModelConfig(kind=kind, num_layers=len(network.layers), hidden_dim=first.affine.weight.shape[0],
                       pnorm_group=first.group if kind == "pnorm" else ModelConfig.pnorm_group, normalize=first.normalize,  # type: ignore[arg-type]
                       tdnn_offsets=text if kind == "tdnn" else ModelConfig(kind).tdnn_offsets,
                       input_transform="none" if network.transform is None else "lda")
