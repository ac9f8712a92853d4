"""Parameter groups of a model, one for each layer, and the settings of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ngsgd.arguments import checked
from ngsgd.errors import ArgumentError, ConfigError
from ngsgd.ops.tensors import refuse_sharded
from ngsgd.optim import updates

# settings that only layer_options have
_LAYER_HINTS = {"lr_factor": float, "orthonormal_constraint": float, "rule": str, "betas": Sequence[float], "eps": float}
_BY_LAYER = ("it is a setting of the layers that AdamW trains: give it by layer, as in "
             "layer_options={\"embedding\": {\"betas\": (0.9, 0.95), \"eps\": 1e-8}}.")
# arguments of torch.optim.AdamW that are not arguments of the constructors
OF_LAYERS = {"betas": _BY_LAYER, "eps": _BY_LAYER}


def require_whole_parameters(model: nn.Module, kind: str) -> None:
    """Reject sharded and uninitialized parameters: limits and rows of a layer need complete ones.
    """
    refuse_sharded(model, kind)
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None and nn.parameter.is_lazy(p):
                raise ConfigError(f"{name or 'the model'} has an uninitialized parameter; run the "
                                  f"model once before creating {kind}.")
            if p is not None and p.requires_grad and p.dtype not in updates.DTYPES:
                raise ConfigError(f"{name or 'the model'} has a parameter of {p.dtype}, which {kind} does not train; keep the "
                                  "parameter in bfloat16 or float32, or freeze it with requires_grad_(False).")


def components(model: nn.Module) -> list[dict[str, Any]]:
    """Return one param group per module with trainable parameters.

    Shared ones belong to the first owner.
    """
    groups, seen = [], set[int]()
    for name, module in model.named_modules():
        params = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in params)
        if params:
            groups.append({"params": params, "name": name or name_of(model)})
    return groups


def name_of(model: nn.Module) -> str:
    """Return the name of a model that is a single layer: its class before replacement."""
    return getattr(model, "plain_class", type(model)).__name__


def set_options(groups: list[dict[str, Any]], layer_options: Mapping[str, Mapping[str, Any]], known: set[str],
                hints: Mapping[str, Any]) -> None:
    """Apply `layer_options` to the groups whose names match.

    Args:
        groups: param groups with names, which this changes.
        layer_options: settings by name or pattern of layers.
        known: settings that layers have.
        hints: types of settings that the constructor also has.
    """
    names = [group["name"] for group in groups]
    for pattern, options in layer_options.items():
        if unknown := sorted(set(options) - known):
            raise ArgumentError(f"Invalid layer_options[{pattern!r}]: no setting {', '.join(unknown)}; there are "
                             f"{', '.join(sorted(known))}" + ("; lr_factor multiplies lr" if "lr" in unknown else ""))
        matching = [group for group in groups if fnmatchcase(group["name"], pattern)]
        if not matching:
            raise ArgumentError(f"Invalid layer_options: no layer is called {pattern!r}; there are {', '.join(names)}")
        settings = checked(options, {**hints, **_LAYER_HINTS}, f"layer_options[{pattern!r}]")
        for group in matching:
            group.update(settings)


def require_non_negative(**values: float) -> None:
    """Reject negative numbers and NaN with torch's message."""
    for name, value in values.items():
        if not value >= 0.0:
            raise ArgumentError(f"Invalid {name}: {value}; it must be at least 0.")


def layer_options(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Collect `layer_options` for the optimizer (see `ngsgd.NGSGD`) from modules with that
    attribute.

    Patterns are relative to their module: "factor" in the module "tdnnf2" becomes "tdnnf2.factor".
    """
    return {f"{name}.{pattern}" if name else pattern: dict(options) for name, module in model.named_modules()
            for pattern, options in getattr(module, "layer_options", {}).items()}
