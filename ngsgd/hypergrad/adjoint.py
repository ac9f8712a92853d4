"""Update-norm limits of one step, and backpropagation of the validation loss through the step.

Letters: P parameters, C of a chunk that fits into the cache, G layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.hypergrad.exact_momentum import CHUNK


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


def with_decay(direction_P: Tensor, w_P: Tensor, l2_G: Sequence[float], groups: Sequence[slice]) -> Tensor:
    """Add l2 w to a gradient in place, and return it; the same operations in both directions."""
    for group, l2 in zip(groups, l2_G, strict=True):
        if l2:
            direction_P[group].add_(w_P[group], alpha=l2)
    return direction_P


class MoveAdjoint(NamedTuple):
    """Backpropagation of dw through w + S s_l lr_l v_l."""

    # lr_l v_l has the gradient by_change_l dw_l - by_velocity_l v_l
    by_change_G: tuple[float, ...]
    by_velocity_G: tuple[float, ...]
    lr_G: list[float]
    max_change_G: list[float]
    max_param_change: float


def move_adjoint(products_G: Sequence[float], lr_G: Sequence[float], shortened: Shortened) -> MoveAdjoint:
    """Backpropagate through the limits, with <dw_l, v_l>; an active one fixes the norm."""
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


class Velocity(NamedTuple):
    """v = values * scale, per layer; the values are integers or floats."""

    values_P: Tensor
    scale_G: Sequence[float]


class Adjoint:
    """Adjoints dw and dv in float64; call `over_move`, `over_decay`, `over_gradient` in order."""

    def __init__(self, dw_P: Tensor, groups: Sequence[slice], dtype: torch.dtype) -> None:
        self.dw_P, self.dv_P, self._groups = dw_P.clone(), torch.zeros_like(dw_P), groups
        # The vector that multiplies the Jacobian of the direction.
        self.z_P = dw_P.new_empty(len(dw_P), dtype=dtype)
        size = CHUNK if dw_P.device.type == "cpu" else 512 * CHUNK
        self._chunks_G = [[slice(first, min(first + size, group.stop)) for first in range(group.start, group.stop, size)]
                          for group in groups]
        longest = max(part.stop - part.start for parts in self._chunks_G for part in parts)
        self._a_C, self._b_C = (dw_P.new_empty(longest) for _ in range(2))

    def over_move(self, velocity: Velocity, lr_G: Sequence[float], shortened: Shortened) -> MoveAdjoint:
        """Backpropagate through w += S s lr v."""
        products_G = [scale * sum(_dots(self.dw_P[part], self._real(velocity.values_P[part])) for part in parts)
                      for parts, scale in zip(self._chunks_G, velocity.scale_G, strict=True)]
        move = move_adjoint(products_G, lr_G, shortened)
        for parts, scale, lr, change, along in zip(self._chunks_G, velocity.scale_G, lr_G, move.by_change_G, move.by_velocity_G,
                                                   strict=True):
            for part in parts:
                self.dv_P[part].add_(self.dw_P[part], alpha=lr * change)
                if along:
                    self.dv_P[part].sub_(self._real(velocity.values_P[part]), alpha=lr * along * scale)
        return move

    def over_decay(self, old: Velocity, direction_P: Tensor, gamma_G: Sequence[float]) -> list[float]:
        """Backpropagate through v = gamma v - (1 - gamma) d; set z = (1 - gamma) dv; return the
        gradient with respect to gamma, <dv, v + d>, G.
        """
        found_G = []
        for parts, scale, gamma in zip(self._chunks_G, old.scale_G, gamma_G, strict=True):
            total = 0.0
            for part in parts:
                dv_C = self.dv_P[part]
                total += scale * _dots(dv_C, self._real(old.values_P[part])) + _dots(dv_C, self._real(direction_P[part]))
                self.z_P[part].copy_(torch.mul(dv_C, 1.0 - gamma, out=self._a_C[:len(dv_C)]))
                dv_C.mul_(gamma)
            found_G.append(total)
        return found_G

    def over_gradient(self, by_w_P: Tensor, w_P: Tensor, l2_G: Sequence[float]) -> list[float]:
        """Backpropagate through d = gradient + l2 w, with the product by_w_P of the Jacobian of the
        gradient and z; return the gradient with respect to l2, G.
        """
        found_G = []
        for parts, l2 in zip(self._chunks_G, l2_G, strict=True):
            total = 0.0
            for part in parts:
                z_C = self._b_C[:part.stop - part.start].copy_(self.z_P[part])
                self.dw_P[part].sub_(self._real(by_w_P[part]))
                total -= _dots(z_C, self._real(w_P[part]))
                if l2:
                    self.dw_P[part].sub_(z_C, alpha=l2)
            found_G.append(total)
        return found_G

    def _real(self, values_C: Tensor) -> Tensor:
        """Return the values in float64; valid until the next call."""
        return self._a_C[:len(values_C)].copy_(values_C)


def _dots(a_C: Tensor, b_C: Tensor) -> float:
    return float(torch.dot(a_C, b_C))
