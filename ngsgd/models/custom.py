"""Custom models: imported by name, created once per process, and validated before the first worker
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ngsgd import imports
from ngsgd.config import ModelConfig
from ngsgd.errors import ConfigError
from ngsgd.imports import first_line
from ngsgd.models.layers import Window
from ngsgd.optim import SGD
from ngsgd.optim.groups import layer_options


def build(config: ModelConfig, *, num_inputs: int, num_classes: int, window: Window, seed: int) -> nn.Module:
    """Create the model of `model._target_` from the sizes, the seed and `model.args`.

    torch's random state is seeded with `seed` during the call and restored afterwards. Raises
    ConfigError if it cannot be imported or called, or is not trainable (see `check`).
    """
    factory = find(config)
    sizes = {"num_inputs": num_inputs, "num_classes": num_classes, "left_context": window.left_context,
             "right_context": window.right_context, "feature_dim": window.feature_dim, "seed": seed}
    # Most modules do not have this argument.
    if window.side_dim:
        sizes["side_dim"] = window.side_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = factory(**sizes, **(config.args or {}))
        except Exception as error:
            raise ConfigError(f"model._target_ {config._target_} failed when it was called with {', '.join(sizes)} and "
                              f"model.args {dict(config.args or {})} ({first_line(error)}); fix it, or the arguments.") from error
    check(model, config._target_, num_inputs, num_classes)
    return model  # type: ignore[no-any-return]


def find(config: ModelConfig) -> Callable[..., Any]:
    """Return the factory; raises ConfigError if it is missing."""
    return imports.find(config._target_, config.search_path, "model", "a torch.nn.Module")


def check(model: Any, target: str, num_inputs: int, num_classes: int) -> None:
    """Raise ConfigError unless the model is a trainable float32 module that maps frames to logits.
    """
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
        SGD(model, 1.0, layer_options=layer_options(model), fast_gemm=False)
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
                          f"tensor of shape {shape}; it must be (3, {num_classes}), a logit for "
                          "each class.")
    if not bool(torch.isfinite(logits).all()):
        raise ConfigError(f"model._target_ {target} returns logits that are not finite for normal "
                          "input; check its initialization.")
    model.load_state_dict(kept)
    model.zero_grad(set_to_none=True)
