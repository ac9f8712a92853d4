"""States of preconditioners: tensors by layer, as they are kept, travel and are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
# the entry of a state dict that belongs to no layer
OWN = ""


def kept(value: Tensor) -> Tensor:
    """The same, with memory of its own."""
    return own(value) if value._is_view() or not value.is_contiguous() else value


def own(value: Tensor) -> Tensor:
    """A copy, laid out as it is after a restart: products of other layouts round differently."""
    return value.clone(memory_format=torch.contiguous_format)


def mean_state(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The mean of the statistics in several workers' states, without what is applied: the next look makes that.

    Counters and draws go on from the first state's.
    """
    counters = states[0][OWN]
    found: dict[str, dict[str, Any]] = {OWN: {**counters, "last_curvature": -1, "last_inverse": -1}}
    for name in sorted({name for state in states for name in state} - {OWN}):
        entries = [state[name] for state in states if "weight" in state.get(name, {})]
        keys = [key for key in (entries[0] if entries else ()) if key == "weight" or key.startswith("statistics.")]
        # of float64 numbers, as the weight is, the mean is one too
        found[name] = {key: torch.stack([torch.as_tensor(entry[key], dtype=torch.float64 if key == "weight" else None)
                                         for entry in entries]).mean(dim=0) for key in keys}
    return found
