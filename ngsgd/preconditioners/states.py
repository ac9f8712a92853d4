"""States of preconditioners: tensors by layer, as they are stored, sent, averaged and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ngsgd.arguments import require_state
from ngsgd.errors import OptimizerStateError

State = dict[str, Tensor]
# Key of the entry of a state dict that belongs to no layer.
OWN = ""
# The random state of a GPU is a seed and an offset.
_CUDA_GENERATOR_BYTES = 16
GROUPS = ("statistics", "inverse")
# Shapes of the tensors of one layer by key, such as {"statistics.A": (5, 5), "inverse.root*": ("x",
# "x")}. A letter is any size, the same everywhere in its group. Keys with ? may be absent; those
# with * keep their dtype.
Layout = Mapping[str, Sequence[int | str]]


def kept(value: Tensor) -> Tensor:
    """Return a copy unless the tensor owns its memory."""
    return own(value) if value._is_view() or not value.is_contiguous() else value


def own(value: Tensor) -> Tensor:
    """Return a copy in the layout after a restart; GEMMs of other layouts round differently."""
    return value.clone(memory_format=torch.contiguous_format)


def working_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype of the estimates of a parameter: at least float32."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def packed_text(text: str) -> Tensor:
    """Return a text as bytes, which every format of checkpoints stores."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def unpacked_text(value: Any) -> str:
    """Return the text of `packed_text`; OptimizerStateError if it is none."""
    try:
        found = torch.as_tensor(value)
        if found.dtype != torch.uint8 or found.ndim != 1:
            raise TypeError(f"{found.dtype} of shape {tuple(found.shape)}")
        return bytes(found.tolist()).decode()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptimizerStateError(f"a text of the state is of type {type(value).__name__} and not readable.") from error


def finite_tensor(value: Any, where: str) -> Tensor:
    """Return an entry of a state as a tensor of finite numbers, or raise OptimizerStateError."""
    try:
        # Torch would round a number of Python to float32.
        found = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptimizerStateError(f"{where} is of type {type(value).__name__}, not a tensor; load a complete state.") from error
    if found.is_complex() or found.layout is not torch.strided or found.dtype == torch.bool:
        raise OptimizerStateError(f"{where} is {found.dtype} ({found.layout}), and must be real and dense.")
    if not bool(found.isfinite().all()):
        raise OptimizerStateError(f"{where} has values that are not finite; load an earlier state.")
    return found


def number_of(counters: Mapping[str, Any], key: str, owner: str, least: int = 0) -> int:
    """Return a whole number of a state of at least `least`, or raise OptimizerStateError."""
    found = finite_tensor(counters[key], f"{key} of the state of {owner}")
    if found.numel() != 1 or float(found) != int(found) or int(found) < least:
        raise OptimizerStateError(f"{key} of the state of {owner} is {counters[key]!r}; it must be a whole number "
                                  f"of at least {least}.")
    return int(found)


def misfit(entry: Mapping[str, Tensor], layout: Layout) -> str:
    """Return how the tensors of a layer differ from their layout; "" if they do not."""
    known = {key.rstrip("?*"): tuple(shape) for key, shape in layout.items()}
    sizes: dict[tuple[str, str], int] = {}
    for group in GROUPS:
        present = {key for key in entry if key.startswith(f"{group}.")}
        needed = {key.rstrip("*") for key in layout if key.startswith(f"{group}.") and "?" not in key}
        if present and (missing := sorted(needed - present)):
            return f"has no {missing[0]}"
        if extra := sorted(present - {*known}):
            return f"has {extra[0]}, and the method stores {', '.join(sorted(known)) or 'nothing'}"
        for key in sorted(present):
            wanted = [sizes.setdefault((group, size), found) if isinstance(size, str) else size
                      for size, found in zip(known[key], entry[key].shape, strict=False)]
            # No estimate is empty.
            if wanted != list(entry[key].shape) or len(known[key]) != entry[key].ndim or not entry[key].numel():
                return f"has {key} of shape {tuple(entry[key].shape)}, and the model needs ({', '.join(map(str, known[key]))})"
    return ""


def converted(entry: Mapping[str, Tensor], layout: Layout | None, p: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a layer on the device of its parameter, in its working dtype."""
    exact = {key.rstrip("?*") for key in layout or () if "*" in key}
    return {key: value.to(p.device) if layout is None or key in exact else value.to(p.device, working_dtype(p))
            for key, value in entry.items()}


def shapes_text(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return the names and shapes of parameters, one a line."""
    return "\n".join(f"{name}\t{' x '.join(map(str, p.shape))}" for name, p in parameters)


def require_counters(state: Any, counters: Mapping[str, Any], method: str, parameters: Mapping[str, Tensor]) -> None:
    """Raise OptimizerStateError if a state is of another method or model, or damaged."""
    require_state(state, (OWN,), method, OptimizerStateError)
    given = state[OWN]
    require_state(given, ("method",), method, OptimizerStateError)
    if (found := unpacked_text(given["method"])) != method:
        raise OptimizerStateError(f"the state is of {found}, and this is {method}; load it into {found}, or start {method} "
                                  "without a state.")
    require_state(given, (*counters, "entries"), method, OptimizerStateError)
    if extra := sorted({*given} - {*counters, "entries"}):
        raise OptimizerStateError(f"the state has {extra[0]!r}, which {method} does not store.")
    saved, own_shapes = (dict(line.partition("\t")[::2] for line in text.split("\n"))
                         for text in (unpacked_text(given["parameters"]), shapes_text(parameters.items())))
    if wrong := [name for name, entry in state.items() if not isinstance(entry, Mapping)]:
        raise OptimizerStateError(f"the state of {wrong[0]} is of type {type(state[wrong[0]]).__name__}, not a dict; load the "
                                  "result of state_dict().")
    if unknown := sorted({*saved} ^ {*own_shapes} or {*state} - {*own_shapes, OWN}):
        whose = "the model does not have" if unknown[0] not in own_shapes else "the model of the state does not have"
        raise OptimizerStateError(f"the state of {method} fits another model: {unknown[0]} is a parameter that {whose}; load "
                                  "the state of the same model.")
    if differing := [name for name, shape in own_shapes.items() if saved[name] != shape]:
        raise OptimizerStateError(f"the state of {differing[0]} is of a parameter of shape {saved[differing[0]]}, and the model "
                                  f"has {own_shapes[differing[0]]}; load the state of the same model.")
    complete, found_entries = {*unpacked_text(given["entries"]).split("\n")} - {""}, {*entries_text(state).split("\n")} - {""}
    if differing := sorted(complete ^ found_entries):
        name, _, key = differing[0].partition("\t")
        what = "lacks" if differing[0] in complete else "has the unknown entry"
        raise OptimizerStateError(f"the state of {name} {what} {key!r}; load a complete state of {method}.")
    for key in ("num_steps", "num_skipped"):
        number_of(given, key, method)
    for key in ("last_curvature", "last_inverse"):
        number_of(given, key, method, -1)
    if "covered" in given and not {*unpacked_text(given["covered"]).split("\n")} <= {"", *parameters}:
        raise OptimizerStateError(f"the state of {method} covers parameters that the model does not have; load the state of the "
                                  "same model.")
    require_generator_state(given["generator"], counters["generator"], method)


def covered_of(counters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters of the matrix of several layers."""
    return tuple(filter(None, unpacked_text(counters["covered"]).split("\n")))


def checked_entry(name: str, entry: Mapping[str, Any], method: str) -> tuple[dict[str, Tensor], float | None]:
    """Return (tensors, weight) of a parameter, or raise OptimizerStateError."""
    where = f"the state of {name}"
    tensors = {key: finite_tensor(value, f"{key} of {where}") for key, value in entry.items()}
    weight = tensors.pop("weight", None)
    if weight is not None and (weight.numel() != 1 or float(weight) < 0.0):
        raise OptimizerStateError(f"{where} has the weight {weight}; it must be a number of at least 0.")
    if unknown := [key for key in tensors if not key.startswith(("statistics.", "inverse."))]:
        raise OptimizerStateError(f"{where} has {unknown[0]}, which {method} does not store.")
    return tensors, None if weight is None else float(weight)


def require_generator_state(given: Any, like: Tensor, method: str) -> None:
    """Raise OptimizerStateError if a value is no state of a random generator of the same device."""
    found = finite_tensor(given, f"generator of the state of {method}")
    try:
        if found.shape != like.shape:
            raise RuntimeError(f"it has {found.numel()} bytes, and this device {like.numel()}")
        if found.is_cpu and like.numel() > _CUDA_GENERATOR_BYTES:
            torch.Generator().set_state(found.to(torch.uint8))
    except RuntimeError as error:
        raise OptimizerStateError(f"the state of {method} has no random state for this device ({error}); load a state of the "
                                  "same kind of device.") from error


def entries_text(state: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the entries of all layers, one a line; a state that lacks one of them is damaged."""
    return "\n".join(sorted(f"{name}\t{key}" for name, entry in state.items() if name != OWN for key in entry))


def mean_state(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the mean of the statistics of several workers, with the counters of the first one."""
    counters = states[0][OWN]
    found: dict[str, dict[str, Any]] = {OWN: {**counters, "last_curvature": -1, "last_inverse": -1}}
    for name in sorted({name for state in states for name in state} - {OWN}):
        entries = [state[name] for state in states if "weight" in state.get(name, {})]
        keys = [key for key in (entries[0] if entries else ()) if key == "weight" or key.startswith("statistics.")]
        # Weights are float64, and so is their mean.
        found[name] = {key: torch.stack([torch.as_tensor(entry[key], dtype=torch.float64 if key == "weight" else None)
                                         for entry in entries]).mean(dim=0) for key in keys}
    found[OWN]["entries"] = packed_text(entries_text(found))
    return found
