"""Blocks of parameters; letters: O outputs, I inputs (with the 1 of the bias)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ngsgd.curvature.layers import has_transposed_weight
from ngsgd.errors import ConfigError

# of a dense matrix: 1.6 GB in float32
_MAX_DIMENSION = 20_000
_AFFINE = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.RNNBase | nn.MultiheadAttention


class Blocks:
    """Blocks of a model by the name of their weight: affine weight and bias, or one tensor."""

    def __init__(self, model: nn.Module, skipped: Collection[str], joins_bias: bool) -> None:
        self._model = model
        # Bias or None by the weight of an affine layer; a weight that is also used otherwise, such
        # as one tied to an embedding, is removed when its curvature is measured.
        self.bias_of = affine_biases(model, skipped) if joins_bias else {}
        # weights of shape inputs x outputs
        self._transposed = {f"{name}.weight".lstrip(".") for name, module in model.named_modules() if has_transposed_weight(module)}

    def names(self, weight: str) -> list[str]:
        """Return the parameters of the block of a weight."""
        bias = self.bias_of.get(weight)
        return [weight] if bias is None else [weight, bias]

    def named(self, weight: str, parts: Iterable[Tensor | None]) -> dict[str, Tensor]:
        """Return (weight part, bias part) by parameter name."""
        return {each: part for each, part in zip(self.names(weight), parts, strict=False) if part is not None}

    def weights_of(self, names: Collection[str]) -> list[str]:
        """Return one name for each block of these parameters, in their order."""
        biases = {bias for weight, bias in self.bias_of.items() if weight in names}
        return [name for name in names if name in self.bias_of or name not in biases]

    def oriented(self, name: str, x: Tensor) -> Tensor:
        """Convert between parameter and outputs-first layout; transposes Conv1D of Hugging Face."""
        return x.T.contiguous() if name in self._transposed else x

    def joined(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by weight, those of affine blocks as by `joined_one`."""
        return {name: self.joined_one(name, grads) for name in self.weights_of(grads.keys())}

    def joined_one(self, weight: str, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the gradient of a block: O x I, with the bias as last column, of an affine one."""
        if weight not in self.bias_of:
            return grads[weight]
        bias, g_OI = self.bias_of[weight], grads[weight].flatten(1)
        return g_OI if bias is None or bias not in grads else torch.cat([g_OI, grads[bias][:, None]], dim=1)

    def parted(self, weight: str, direction: Tensor, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of a direction by parameter, in the shapes of the gradients."""
        bias = self.bias_of.get(weight)
        if bias is None or bias not in grads:
            return {weight: direction.view_as(grads[weight])}
        return {weight: direction[:, :-1].reshape(grads[weight].shape), bias: direction[:, -1].clone()}

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter with outputs first."""
        shape = self._model.get_parameter(name).shape
        return shape[::-1] if name in self._transposed else shape

    def sides(self, weight: str) -> tuple[int, int, int]:
        """Return (outputs, inputs with the 1 of the bias, inputs) of a block."""
        shape = self.shape(weight)
        num_inputs = math.prod(shape[1:])
        return (shape[0] if shape else 1), num_inputs + (self.bias_of.get(weight) is not None), num_inputs


def flat(parts: Mapping[str, Tensor]) -> Tensor:
    """Return tensors as one vector, sorted by name, because a restart may change the order."""
    return torch.cat([part.flatten() for _, part in sorted(parts.items())])


def unflat(flat_D: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of a vector, in the shapes of the tensors of which `flat` made it."""
    ordered = sorted(like.items())
    parts = flat_D.split([each.numel() for _, each in ordered])
    return {name: part.view(each.shape) for (name, each), part in zip(ordered, parts, strict=True)}


def affine_biases(model: nn.Module, skipped: Collection[str]) -> dict[str, str | None]:
    """Map weight to bias for affine layers and for the GEMMs in recurrent and attention layers."""
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if not (isinstance(module, _AFFINE) or has_transposed_weight(module)) or getattr(module, "groups", 1) > 1:
            continue
        own = {key for key, p in module.named_parameters(recurse=False)
               if p.requires_grad and f"{name}.{key}".lstrip(".") not in skipped}
        for key in own:
            if "weight" in key:
                bias = key.replace("weight", "bias")
                found[f"{name}.{key}".lstrip(".")] = f"{name}.{bias}".lstrip(".") if bias in own else None
    return found


def skipped_parameters(model: nn.Module, skip: Sequence[str]) -> set[str]:
    """Return the names of the parameters that `skip` excludes: by name, pattern or class of a
    module, or by name or pattern of a parameter; ConfigError for an entry that matches nothing.
    """
    modules = [(name, getattr(module, "plain_class", type(module)).__name__, {id(p) for p in module.parameters()})
               for name, module in model.named_modules(remove_duplicate=False)]
    # A tied parameter has several names.
    parameters = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    skipped: set[int] = set()
    problems = []
    for entry in skip:
        found = [inside for name, kind, inside in modules if fnmatchcase(name, entry) or kind == entry]
        found += [{key} for name, key in parameters if fnmatchcase(name, entry)]
        if not found:
            known = {name for name, _ in parameters}.union(*({name, kind} for name, kind, _ in modules))
            near = get_close_matches(entry, sorted(known), n=3, cutoff=0.5)
            remedy = f"did you mean {' or '.join(near)}?" if near else "see named_parameters()."
            problems.append(f"skip has {entry!r}, which is no name of a module, a parameter or a class of the model; {remedy}")
        skipped.update(*found)
    if problems:
        raise ConfigError(problems)
    return {name for name, p in model.named_parameters() if id(p) in skipped}


def require_parameters(model: nn.Module, method: str) -> nn.Parameter:
    """Return the first parameter of a model; raise ConfigError if it has none."""
    if (first := next(model.parameters(), None)) is None:
        raise ConfigError(f"{type(model).__name__} has no parameters, so {method} has no gradient to "
                          "compute; give the module whose parameters the optimizer trains.")
    return first


def require_supported(model: nn.Module, skipped: Collection[str], method: str) -> None:
    """Raise ConfigError for trained parameters that are complex, or have no elements."""
    problems = []
    for name, p in model.named_parameters():
        if name in skipped or not p.requires_grad:
            continue
        if p.is_complex():
            problems.append(f"{method}: {name} is {p.dtype}, and estimates are real; train its real and imaginary part as two "
                            f"parameters, or exclude it by skip=({name!r},).")
        elif not p.numel():
            problems.append(f"{method}: {name} has the shape {tuple(p.shape)} and no elements; remove the layer, or exclude it by "
                            f"skip=({name.rpartition('.')[0] or name!r},).")
    if problems:
        raise ConfigError(problems)


def require_small(name: str, dimension: int, largest: int = _MAX_DIMENSION, choose: str = "KFAC, SMWNG or SENG") -> None:
    """Raise ConfigError for a dense matrix that is too large."""
    if dimension > largest:
        raise ConfigError(f"{name} has {dimension} parameters, whose dense curvature would take "
                          f"{dimension**2 * 4 / 1e9:.2g} GB; choose {choose}, or skip the layer.")
