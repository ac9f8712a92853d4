"""Update-norm limits of one step, and their derivatives, in numbers per layer.

Letters: G layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Shortened(NamedTuple):
    """Factors of the updates of a step."""

    layer_G: tuple[float, ...]  # 1: not limited
    model: float
    # norms of the velocities, if there are limits
    norm_G: tuple[float, ...]

    def rates(self, lr_G: Sequence[float]) -> list[float]:
        """Return the factor of the velocity of each layer."""
        return [self.model * factor * lr for factor, lr in zip(self.layer_G, lr_G, strict=True)]


def shorten(norms_G: Sequence[float], lr_G: Sequence[float], max_change_G: Sequence[float], max_param_change: float) -> Shortened:
    """Compute factors for velocities of these norms; a limit of 0 is none."""
    sizes_G = [lr * norm for lr, norm in zip(lr_G, norms_G, strict=True)]
    layer_G = tuple(limit / size if 0.0 < limit < size else 1.0 for size, limit in zip(sizes_G, max_change_G, strict=True))
    total = math.sqrt(sum((factor * size) ** 2 for factor, size in zip(layer_G, sizes_G, strict=True)))
    return Shortened(layer_G, max_param_change / total if 0.0 < max_param_change < total else 1.0, tuple(norms_G))


class MoveAdjoint(NamedTuple):
    """Backpropagation of dw through w + S s_l lr_l v_l."""

    # lr_l v_l has the gradient by_change_l dw_l - by_velocity_l v_l
    by_change_G: tuple[float, ...]
    by_velocity_G: tuple[float, ...]
    lr_G: list[float]
    max_change_G: list[float]
    max_param_change: float


def move_adjoint(products_G: Sequence[float], lr_G: Sequence[float], shortened: Shortened) -> MoveAdjoint:
    """Backpropagate through the limits.

    If the limit of a layer is active, its update has a fixed norm and its learning rate no effect.

    Args:
        products_G: <dw_l, v_l>.
        lr_G: learning rates.
        shortened: factors of the step.
    """
    S, s_G, n_G = shortened.model, shortened.layer_G, shortened.norm_G
    # S < 1: unit vector e = s lr v / total of all layers, d_limit = <e, dw>, and the remaining
    # gradient is dw' = S (dw - d_limit e).
    total = math.sqrt(sum((s * lr * n) ** 2 for s, lr, n in zip(s_G, lr_G, n_G, strict=True))) if S < 1.0 else 1.0
    d_model = sum(s * lr * p for s, lr, p in zip(s_G, lr_G, products_G, strict=True)) / total if S < 1.0 else 0.0
    change_G, velocity_G, d_lr_G, d_limit_G = [], [], [], []
    for product, lr, s, n in zip(products_G, lr_G, s_G, n_G, strict=True):
        along = S * d_model * s * lr / total        # component of v in dw'
        inner = S * product - along * n * n         # <dw', v>
        # <v / n, dw'>, and then s (dw' - d_limit v / n)
        d_limit = inner / n if s < 1.0 else 0.0
        change_G.append(s * S)
        velocity_G.append(s * (along + d_limit / n) if s < 1.0 else along)
        d_lr_G.append(inner if s == 1.0 else 0.0)
        d_limit_G.append(d_limit)
    return MoveAdjoint(tuple(change_G), tuple(velocity_G), d_lr_G, d_limit_G, d_model)
