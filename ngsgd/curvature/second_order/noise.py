"""How noisy the gradient of a minibatch is, from the variances that `collect` leaves (McCandlish et al. 2018).

    trace of the covariance of one sample's gradient      S = sum of the variances, N / (N - 1) for a minibatch of N
    squared norm of the true gradient                     |g|^2 - S / N
    simple noise scale                                    S / |true g|^2: the minibatch size from which averaging stops to help
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GradientNoise:
    """Of one parameter or a whole model."""

    trace: float           # S
    # of the true gradient; an estimate, so it may be negative on a small minibatch
    squared_norm: float

    @property
    def noise_scale(self) -> float:
        """In samples; infinite where the minibatch does not show a gradient above its noise."""
        return self.trace / self.squared_norm if self.squared_norm > 0.0 else float("inf")

    @property
    def signal_to_noise(self) -> float:
        """Squared norm of the gradient over the trace of one sample's covariance."""
        return self.squared_norm / self.trace if self.trace > 0.0 else float("inf")


def gradient_noise(quantities: Mapping[str, Any], num_samples: int) -> dict[str, GradientNoise]:
    """The noise of every parameter by name, and of all together as "".

    Args:
        quantities: what `collect(model, "variance", "second_moment", ..)` gave.
        num_samples: N, of the minibatch; at least 2.

    >>> from types import SimpleNamespace
    >>> q = {"w": SimpleNamespace(variance=torch.tensor([3.0]), second_moment=torch.tensor([7.0]))}
    >>> gradient_noise(q, 4)["w"]
    GradientNoise(trace=4.0, squared_norm=3.0)
    """
    if num_samples < 2:
        raise ValueError(f"num_samples is {num_samples}; a variance takes at least 2")
    found = {}
    for name in quantities:
        variance = float(quantities[name].variance.sum(dtype=torch.float64))
        trace = variance * num_samples / (num_samples - 1)
        mean = float(quantities[name].second_moment.sum(dtype=torch.float64)) - variance
        found[name] = GradientNoise(trace, mean - trace / num_samples)
    found[""] = GradientNoise(sum(noise.trace for noise in found.values()), sum(noise.squared_norm for noise in found.values()))
    return found
