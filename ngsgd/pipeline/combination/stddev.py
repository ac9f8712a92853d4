"""Rescaling of scale-invariant layers (nnet-normalize-stddev in Kaldi)."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from ngsgd.models import PNorm, Renormalize
from ngsgd.training.parameter_vector import FlatLayout, Vector


def normalize_stddev(parameters: Vector, model: nn.Module, stddev: float = 1.0) -> Vector:
    """Scale each scale-invariant layer so that its parameters have this standard deviation.

    The function of the network is unchanged. Weights of a generalized combination need not sum to
    one, so such a layer may have any scale, which affects the meaning of a learning rate or
    update-norm clipping in further training. The standard deviation is over weights and bias
    together, about their mean, as in Kaldi.

    Args:
        parameters: flat parameters.
        model: defines the layers (`scale_invariant_layers`); its parameters are ignored.
        stddev: the target. Default: 1.

    Returns:
        The rescaled parameters.
    """
    layout = FlatLayout.of(model)
    state = layout.unflatten(parameters)
    for layer in scale_invariant_layers(model):
        own = [state[f"{layer}.{name}"] for name, _ in model.get_submodule(layer).named_parameters()]
        found = float(torch.cat([p.double().flatten() for p in own]).std(correction=0))
        if found > 0.0:
            for p in own:
                p.mul_(stddev / found)
    return layout.flatten(state)


def scale_invariant_layers(model: nn.Module) -> list[str]:
    """Names of affine layers before p-norm or ReLU followed by renormalization.

    Their scale, including the bias, does not change any output. Only layers of a plain
    nn.Sequential are found; frozen and shared parameters are excluded. Kaldi supports only p-norm;
    ReLU is also scale-equivariant. Rows whose root mean square is below 2^-33 do change, because
    renormalization has a floor there.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = []
    for prefix, parent in model.named_modules():
        if not isinstance(parent, nn.Sequential) or type(parent).forward is not nn.Sequential.forward:
            continue
        children = list(parent.named_children())
        for (name, affine), (_, nonlinearity), (_, last) in zip(children, children[1:], children[2:], strict=False):
            if not (type(affine) is nn.Linear and isinstance(nonlinearity, (PNorm, nn.ReLU)) and isinstance(last, Renormalize)):
                continue
            if all(p.requires_grad and uses[id(p)] == 1 for p in affine.parameters()):
                found.append(f"{prefix}.{name}".lstrip("."))
    return found
