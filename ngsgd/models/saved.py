"""Reconstruction of a trained network from its description (`model.json`) and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.models.build import build_model
from ngsgd.models.growing import set_stage
from ngsgd.models.growth_stages import Stage
from ngsgd.models.inputs import DataStatistics, Window


def rebuild(
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    state: Mapping[str, Tensor],
    transform: Tensor | None,
) -> tuple[nn.Module, npt.NDArray[np.float64]]:
    """Build the network of a description and load its parameters.

    Args:
        about: content of model.json.
        settings: model settings in it, or replacements.
        state: parameters and buffers by name.
        transform: the fixed first layer, if the network has one.

    Returns:
        (network in evaluation mode, prior of each class).

    Raises:
        ValueError: values that are not finite, or a description that does not fit the parameters.
        KeyError, TypeError, RuntimeError, AttributeError: an incomplete or damaged description.
    """
    # Decoding would not detect non-finite parameters.
    wrong = [
        name
        for name, values in {**state, "input_transform": transform}.items()
        if values is not None and values.is_floating_point() and not bool(values.isfinite().all())
    ]
    if wrong:
        raise ValueError(f"its parameters have values in {wrong[0]} that are not finite")
    model = build_model(
        ModelConfig(**settings),
        about["num_inputs"],
        about["num_classes"],
        seed=0,
        window=window_of(about),
        statistics=DataStatistics(tuple(about["class_counts"]), transform),
    )
    model.load_state_dict(dict(state))
    if about["stage"]:
        set_stage(model, Stage(**about["stage"]))
    prior_P = np.asarray(about["priors"], dtype=np.float64)
    if prior_P.shape != (about["num_classes"],) or not np.isfinite(prior_P).all():
        raise ValueError(f"its priors are not {about['num_classes']} finite numbers")
    return model.eval(), prior_P


def window_of(about: Mapping[str, Any]) -> Window:
    """Return the window of the network input."""
    return Window(
        about["left_context"], about["right_context"], about["feature_dim"], about["side_dim"]
    )


def least_parameters(model: ModelConfig, num_inputs: int, num_classes: int) -> int:
    """Return a lower bound of the number of weights in affine layers, as an exact integer of any
    size.
    """
    width, outputs = model.hidden_dim, model.hidden_dim
    if model.kind == "pnorm":
        outputs = max(1, width // model.pnorm_group)
    between = outputs * width
    if model.kind == "tdnnf":
        between = 2 * min(model.bottleneck_dim, width) * width
    return num_inputs * width + (model.num_layers - 1) * between + outputs * num_classes
