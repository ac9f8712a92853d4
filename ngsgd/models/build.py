"""Construction of a model from its configuration."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd import imports
from ngsgd.config import ModelConfig
from ngsgd.errors import ConfigError
from ngsgd.imports import first_line
from ngsgd.models.growing import Split, Stage, StagedModel, SumSubclasses, prior_scale, set_stage, split_targets
from ngsgd.models.layers import DataStatistics, FixedAffine, FixedScale, Layer, Window, dnn_layers, initialize, zero
from ngsgd.models.tdnn import FactoredTdnn, SplicedTransform, Tdnn, TimeDelayNetwork
from ngsgd.optim import SGD
from ngsgd.optim.groups import layer_options


def build_model(config: ModelConfig, num_inputs: int, num_classes: int, seed: int, *, window: Window | None = None,
                statistics: DataStatistics | None = None) -> nn.Module:
    """Build a model from `num_inputs` spliced features to `num_classes` logits.

    Args:
        config: the model section.
        num_inputs: inputs per row.
        num_classes: outputs.
        seed: the initialization depends on this only.
        window: composition of the inputs from frames; required by TDNNs and custom modules.
        statistics: required by an input transform, sub-classes and prior scales.

    Raises:
        ConfigError: a custom module does not fit, or there are fewer sub-classes than classes.
    """
    window = window or Window(0, 0, num_inputs)
    statistics = statistics or DataStatistics()
    if config._target_:
        return _custom(config, num_inputs=num_inputs, num_classes=num_classes, window=window, seed=seed)
    front, layers, width = _hidden_layers(config, num_inputs, window, statistics.input_transform)
    output = _output("output", width, num_classes, _scales(config, statistics, [1] * num_classes))
    split = _split(config, width, num_classes, statistics)
    generator = torch.Generator().manual_seed(seed)
    initialize((module for layer in layers for module in layer.values()), generator)
    make = partial(TimeDelayNetwork, window=window) if config.kind in ("tdnn", "tdnnf") else nn.Sequential
    if not config.add_layers_period and split is None:
        return make(OrderedDict((name, module) for part in (front, *layers, output) for name, module in part.items()))
    return StagedModel(front, layers, output, split, make)


def _hidden_layers(config: ModelConfig, num_inputs: int, window: Window,
                   transform: Tensor | None) -> tuple[Layer, list[Layer], int]:
    """Return (modules before them, hidden layers, outputs of the last)."""
    front: Layer = OrderedDict()
    if config.kind not in ("tdnn", "tdnnf"):
        if transform is not None:
            front["input_transform"] = FixedAffine(transform)
            num_inputs = len(transform)
        return front, *dnn_layers(config, num_inputs)
    offsets, width, side_dim = list(config.layer_offsets()), window.feature_dim, window.side_dim
    if transform is not None:
        front["input_transform"] = SplicedTransform(transform, offsets[0])
        offsets[0], width, side_dim = (0,), len(transform), 0
    layers: list[Layer] = []
    for number, of_layer in enumerate(offsets, start=1):
        layer = FactoredTdnn(config, width, of_layer) if config.kind == "tdnnf" and number > 1 else \
            Tdnn(config, width, of_layer, side_dim=side_dim if number == 1 else 0)
        layers.append(OrderedDict({f"{config.kind}{number}": layer}))
        width = config.hidden_dim
    return front, layers, width


def _output(name: str, width: int, num_outputs: int, scale: Tensor | None) -> Layer:
    affine = nn.Linear(width, num_outputs)
    zero(affine)
    layer: Layer = OrderedDict({name: affine})
    if scale is not None:
        layer[f"{name}_scale"] = FixedScale(scale)
    return layer


def _split(config: ModelConfig, width: int, num_classes: int, statistics: DataStatistics) -> Split | None:
    if not config.num_subclasses:
        return None
    if config.num_subclasses <= num_classes:
        raise ConfigError(f"model.num_subclasses is {config.num_subclasses}, but there are "
                          f"{num_classes} classes; it is the total over all classes, so increase it, or use 0 for none.")
    targets = split_targets(statistics.class_counts, config.num_subclasses)
    modules = _output("subclass_output", width, sum(targets), _scales(config, statistics, targets))
    modules["sum"] = SumSubclasses(targets)
    scale_P = _scales(config, statistics, [1] * num_classes)
    return Split(modules, tuple(targets), () if scale_P is None else tuple(scale_P.tolist()))


def _scales(config: ModelConfig, statistics: DataStatistics, targets: Sequence[int]) -> Tensor | None:
    """Return the prior scale of every row of an output layer, equal for the rows of one class."""
    if not config.prior_scale_power:
        return None
    return prior_scale(statistics.class_counts, config.prior_scale_power).repeat_interleave(torch.tensor(targets))


def rebuild(about: Mapping[str, Any], settings: Mapping[str, Any], state: Mapping[str, Tensor],
            transform: Tensor | None) -> tuple[nn.Module, npt.NDArray[np.float64]]:
    """Build the network of a description (model.json); return it in evaluation mode, and its
    priors.

    `settings` are those in `about` or replacements, `state` the parameters and buffers by name, and
    `transform` the fixed first layer. Raises ValueError for values that are not finite or do not
    fit, KeyError, TypeError, RuntimeError or AttributeError for a damaged description.
    """
    # Decoding would not detect non-finite parameters.
    wrong = [name for name, values in {**state, "input_transform": transform}.items()
             if values is not None and values.is_floating_point() and not bool(values.isfinite().all())]
    if wrong:
        raise ValueError(f"its parameters have values in {wrong[0]} that are not finite")
    model = build_model(ModelConfig(**settings), about["num_inputs"], about["num_classes"], seed=0, window=window_of(about),
                        statistics=DataStatistics(tuple(about["class_counts"]), transform))
    model.load_state_dict(dict(state))
    if about["stage"]:
        set_stage(model, Stage(**about["stage"]))
    prior_P = np.asarray(about["priors"], dtype=np.float64)
    if prior_P.shape != (about["num_classes"],) or not np.isfinite(prior_P).all():
        raise ValueError(f"its priors are not {about['num_classes']} finite numbers")
    return model.eval(), prior_P


def window_of(about: Mapping[str, Any]) -> Window:
    """Return the window of the network input."""
    return Window(about["left_context"], about["right_context"], about["feature_dim"], about["side_dim"])


def least_parameters(model: ModelConfig, num_inputs: int, num_classes: int) -> int:
    """Return a lower bound of the number of weights in affine layers, an integer of any size."""
    width = model.hidden_dim
    outputs = max(1, width // model.pnorm_group) if model.kind == "pnorm" else width
    between = 2 * min(model.bottleneck_dim, width) * width if model.kind == "tdnnf" else outputs * width
    return num_inputs * width + (model.num_layers - 1) * between + outputs * num_classes


def _custom(config: ModelConfig, *, num_inputs: int, num_classes: int, window: Window, seed: int) -> nn.Module:
    factory = find_custom(config)
    sizes = {"num_inputs": num_inputs, "num_classes": num_classes, "left_context": window.left_context,
             "right_context": window.right_context, "feature_dim": window.feature_dim, "seed": seed}
    # Most modules do not have this argument.
    if window.side_dim:
        sizes["side_dim"] = window.side_dim
    # the random state of torch is restored afterwards
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = factory(**sizes, **(config.args or {}))
        except Exception as error:
            raise ConfigError(f"model._target_ {config._target_} failed when it was called with {', '.join(sizes)} and "
                              f"model.args {dict(config.args or {})} ({first_line(error)}); fix it, or the arguments.") from error
    check_custom(model, config._target_, num_inputs, num_classes)
    return model  # type: ignore[no-any-return]


def find_custom(config: ModelConfig) -> Callable[..., Any]:
    """Return the factory; raises ConfigError if it is missing."""
    return imports.find(config._target_, config.search_path, "model", "a torch.nn.Module")


def check_custom(model: Any, target: str, num_inputs: int, num_classes: int) -> None:
    """Raise ConfigError unless the model is a trainable float32 module from frames to logits."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_ {target} returned a {type(model).__name__}; it must return a torch.nn.Module.")
    wrong = [f"{name} ({str(value.dtype).removeprefix('torch.')})" for name, value in model.state_dict().items()
             if (value.is_floating_point() or value.is_complex()) and value.dtype != torch.float32]
    if wrong:
        raise ConfigError(f"model._target_ {target} has {', '.join(wrong[:3])}; parameters and "
                          "buffers must be float32, the dtype of averaging.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"model._target_ {target} has no parameter that requires a gradient; there is nothing to train.")
    try:
        SGD(model, 1.0, layer_options=layer_options(model))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model._target_ {target} has layer_options that do not fit ({first_line(error)}); see "
                          "ngsgd.optim.SGD.") from error
    _check_a_pass(model, target, num_inputs, num_classes)


def _check_a_pass(model: nn.Module, target: str, num_inputs: int, num_classes: int) -> None:
    """Run forward and backward on noise in the shape of a minibatch; buffers are restored."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            logits = model(torch.randn(3, num_inputs))
            shape = tuple(logits.shape)
            if shape == (3, num_classes):
                nn.functional.cross_entropy(logits, torch.zeros(3, dtype=torch.int64), reduction="sum").backward()
        except Exception as error:
            raise ConfigError(f"model._target_ {target} failed on three frames of {num_inputs} "
                              f"spliced features ({first_line(error)}); fix its forward.") from error
    if shape != (3, num_classes):
        raise ConfigError(f"model._target_ {target} maps three rows of {num_inputs} inputs to a "
                          f"tensor of shape {shape}; it must be (3, {num_classes}), a logit for each class.")
    if not bool(torch.isfinite(logits).all()):
        raise ConfigError(f"model._target_ {target} returns logits that are not finite for normal "
                          "input; check its initialization.")
    model.load_state_dict(kept)
    model.zero_grad(set_to_none=True)
