"""Learning rates per layer that equalize relative changes (Kaldi: nnet-modify-learning-rates).

They are used in sequence training. A layer is a module with direct entries. Letters: L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ngsgd.training.parameter_vector import FlatLayout, Vector

# largest factor of change per outer iteration, so that a layer with one tiny update does not
# diverge
_MAX_STEP = 4.0


def equalized_rates(layout: FlatLayout, before: Vector, after: Vector, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the factors on the rates of the layers for the next outer iteration.

    Each factor is multiplied by the geometric mean of the relative changes over the relative change
    of its layer. A layer that changed twice as much as the others is slowed down by 2. Factors of
    unchanged layers stay. The geometric mean of the factors is 1.
    """
    change = {layer: value for layer, value in _relative_changes(layout, before, after).items() if value > 0.0}
    if not change:
        return dict(rates)
    mean = _geometric_mean(change)
    found = {layer: rates.get(layer, 1.0) * min(_MAX_STEP, max(1.0 / _MAX_STEP, mean / value)) for layer, value in change.items()}
    norm = _geometric_mean(found)
    return {**rates, **{layer: rate / norm for layer, rate in found.items()}}


def _relative_changes(layout: FlatLayout, before: Vector, after: Vector) -> dict[str, float]:
    changes: dict[str, list[float]] = {}
    statistics = layout.statistics()
    for name in layout.names:
        part = layout.part(name)
        if part not in statistics:
            totals = changes.setdefault(name.rpartition(".")[0], [0.0, 0.0])
            totals[0] += float(np.square(after[part] - before[part]).sum())
            totals[1] += float(np.square(before[part]).sum())
    return {layer: math.sqrt(moved / size) if size > 0.0 else 0.0 for layer, (moved, size) in changes.items()}


def _geometric_mean(values: Mapping[str, float]) -> float:
    return math.exp(sum(map(math.log, values.values())) / len(values))
