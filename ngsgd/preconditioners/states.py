"""States of preconditioners: tensors by layer, as they are stored, sent and averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
# Key of the entry of a state dict that belongs to no layer.
OWN = ""


def kept(value: Tensor) -> Tensor:
    """Return a copy unless the tensor owns its memory."""
    return own(value) if value._is_view() or not value.is_contiguous() else value


def own(value: Tensor) -> Tensor:
    """Return a copy in the layout after a restart; GEMMs of other layouts round differently."""
    return value.clone(memory_format=torch.contiguous_format)


def mean_state(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the mean of the statistics of several workers, without inverses.

    The next curvature update computes the inverses. Counters and random states are those of the
    first worker.
    """
    counters = states[0][OWN]
    found: dict[str, dict[str, Any]] = {OWN: {**counters, "last_curvature": -1, "last_inverse": -1}}
    for name in sorted({name for state in states for name in state} - {OWN}):
        entries = [state[name] for state in states if "weight" in state.get(name, {})]
        keys = [key for key in (entries[0] if entries else ()) if key == "weight" or key.startswith("statistics.")]
        # Weights are float64, and so is their mean.
        found[name] = {key: torch.stack([torch.as_tensor(entry[key], dtype=torch.float64 if key == "weight" else None)
                                         for entry in entries]).mean(dim=0) for key in keys}
    return found
