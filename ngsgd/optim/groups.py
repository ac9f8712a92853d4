"""Parameter groups of a model, one for each layer, and the settings of layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ngsgd.arguments import checked, require_state
from ngsgd.errors import ArgumentError, ConfigError, OptimizerStateError
from ngsgd.ops.tensors import refuse_sharded
from ngsgd.optim import updates

# settings that only layer_options have
_LAYER_HINTS = {"lr_factor": float, "orthonormal_constraint": float, "rule": str, "betas": Sequence[float], "eps": float}
_BY_LAYER = ("it is a setting of the layers that AdamW trains: give it by layer, as in "
             "layer_options={\"embedding\": {\"betas\": (0.9, 0.95), \"eps\": 1e-8}}.")
# arguments of torch.optim.AdamW that are not arguments of the constructors
OF_LAYERS = {"betas": _BY_LAYER, "eps": _BY_LAYER}
# name of a group of parameters that no layer of the model has
OUTSIDE = "(outside of the model)"


def require_whole_parameters(model: nn.Module, kind: str) -> None:
    """Reject sharded and uninitialized parameters: limits and rows need complete ones."""
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
    """Return one param group per module that is the first owner of trainable parameters."""
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
    """Apply `layer_options` by name or pattern; `hints` has the types of the constructor."""
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
    """Collect `layer_options` of `ngsgd.NGSGD` from modules with that attribute.

    Patterns are relative to their module: "factor" in the module "tdnnf2" becomes "tdnnf2.factor".
    """
    return {f"{name}.{pattern}" if name else pattern: dict(options) for name, module in model.named_modules()
            for pattern, options in getattr(module, "layer_options", {}).items()}


def split_by_layer(model: nn.Module, param_group: Mapping[str, Any],
                   groups: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a group for each layer with parameters in `param_group`, named apart from `groups`."""
    params = param_group["params"]
    params = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
    owners = {id(p): name or name_of(model) for name, module in reversed(list(model.named_modules()))
              for p in module.parameters(recurse=False)}
    members: dict[str, list[Tensor]] = {}
    for p in params:
        name = owners.get(id(p), OUTSIDE)
        if not p.requires_grad:
            raise ConfigError(f"a parameter of {name} is frozen; call requires_grad_(True) on it before add_param_group.")
        members.setdefault(name, []).append(p)
    taken = {group["name"] for group in groups}
    for name, of_layer in members.items():
        numbers = (f"{name}#{number}" for number in itertools.count(2))
        free = name if name not in taken else next(number for number in numbers if number not in taken)
        yield {**param_group, "params": of_layer, "name": free}


def saved_by_parameter(own: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any],
                       kind: str) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return (parameter, saved state) in order; raise OptimizerStateError if they do not fit."""
    require_state(state_dict, ("state", "param_groups"), kind, OptimizerStateError)
    groups = state_dict["param_groups"]
    if any("name" not in group for group in groups):
        raise OptimizerStateError(f"this is not a state of {kind}: its param_groups have no names, "
                                  f"as those of torch optimizers; load the state_dict of {kind}, "
                                  "or start without it.")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in own]:
        layers, own_layers = (", ".join(group["name"] for group in each) for each in (groups, own))
        raise OptimizerStateError(f"the state is of the layers {layers}, this {kind} of "
                                  f"{own_layers}; load it with the same model, and freeze layers "
                                  "after the optimizer is created.")
    found = []
    for group, saved in zip(own, groups, strict=True):
        for p, index in zip(group["params"], saved["params"], strict=True):
            values = state_dict["state"].get(index, {})
            for key in ("velocity", "exp_avg", "exp_avg_sq"):
                if values.get(key) is not None and values[key].shape != p.shape:
                    raise OptimizerStateError(f"the state of {saved['name']} is of shape "
                                              f"{tuple(values[key].shape)}, the parameter of shape "
                                              f"{tuple(p.shape)}; load it with the same model.")
            found.append((p, values))
    return found
