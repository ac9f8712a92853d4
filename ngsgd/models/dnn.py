"""The feed-forward acoustic models of the paper: affine, nonlinearity, renormalisation, and a softmax output."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import nn

from ngsgd.config import ModelConfig
from ngsgd.models.layers import PNorm, Renormalize


def build_model(config: ModelConfig, num_inputs: int, num_classes: int, seed: int) -> nn.Sequential:
    """A DNN from `num_inputs` spliced features to `num_classes` logits, initialised as a function of `seed` alone."""
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    width = num_inputs
    for layer in range(1, config.num_layers + 1):
        modules[f"affine{layer}"] = nn.Linear(width, config.hidden_dim)
        modules[f"nonlinearity{layer}"] = nn.ReLU() if config.kind == "relu" else PNorm(config.pnorm_group)
        modules[f"renormalize{layer}"] = Renormalize()
        if config.dropout_schedule:
            modules[f"dropout{layer}"] = nn.Dropout(0.0)  # the proportion follows the schedule, in each job
        width = config.hidden_dim if config.kind == "relu" else config.hidden_dim // config.pnorm_group
    modules["output"] = nn.Linear(width, num_classes)
    model = nn.Sequential(modules)
    _initialise(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _initialise(model: nn.Sequential, generator: torch.Generator) -> None:
    """Kaldi's start (C.7): weights of standard deviation 1/sqrt(inputs), biases of 1; the output layer starts at zero."""
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            is_output = name == "output"
            module.weight.normal_(0.0, 0.0 if is_output else 1.0 / math.sqrt(module.in_features), generator=generator)
            module.bias.normal_(0.0, 0.0 if is_output else 1.0, generator=generator)
