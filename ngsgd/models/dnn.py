"""Feed-forward acoustic models of the paper: affine layers, nonlinearity, renormalization."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import nn

from ngsgd.config import ModelConfig
from ngsgd.models.layers import PNorm, normalization

# Modules of one hidden layer, by their names in the model.
Layer = OrderedDict[str, nn.Module]


def dnn_layers(config: ModelConfig, num_inputs: int) -> tuple[list[Layer], int]:
    """Return (hidden layers, outputs of the last)."""
    layers = []
    width = num_inputs
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
