"""Gradient noise of a minibatch, from the variances that `collect` computes (McCandlish et al.

2018).

    trace of the per-sample covariance    S = N / (N - 1) times the sum of the variances
    squared norm of the true gradient     |g|^2 - S / N
    simple noise scale                    S / |true g|^2

The noise scale is the minibatch size above which averaging saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GradientNoise:
    """Gradient noise of one parameter or a complete model."""

    trace: float           # S
    # of the true gradient; an estimate, so it may be negative on a small minibatch
    squared_norm: float

    @property
    def noise_scale(self) -> float:
        """Noise scale in samples; infinite if the gradient is not above its noise."""
        return self.trace / self.squared_norm if self.squared_norm > 0.0 else float("inf")

    @property
    def signal_to_noise(self) -> float:
        """Squared norm of the gradient over the trace of the per-sample covariance."""
        return self.squared_norm / self.trace if self.trace > 0.0 else float("inf")


def gradient_noise(quantities: Mapping[str, Any], num_samples: int) -> dict[str, GradientNoise]:
    """Compute the noise of every parameter by name, and of all together as "".

    Args:
        quantities: result of `collect(model, "variance", "second_moment", ..)`.
        num_samples: N, of the minibatch; at least 2.

    Example:
        >>> from types import SimpleNamespace
        >>> q = {"w": SimpleNamespace(variance=torch.tensor([3.0]), second_moment=torch.tensor([7.0]))}
        >>> gradient_noise(q, 4)["w"]
        GradientNoise(trace=4.0, squared_norm=3.0)
    """
    if num_samples < 2:
        raise ValueError(f"num_samples is {num_samples}; a variance needs at least 2")
    found = {}
    for name in quantities:
        variance = float(quantities[name].variance.sum(dtype=torch.float64))
        trace = variance * num_samples / (num_samples - 1)
        mean = float(quantities[name].second_moment.sum(dtype=torch.float64)) - variance
        found[name] = GradientNoise(trace, mean - trace / num_samples)
    found[""] = GradientNoise(sum(noise.trace for noise in found.values()), sum(noise.squared_norm for noise in found.values()))
    return found
