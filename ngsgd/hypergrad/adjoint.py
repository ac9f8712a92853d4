"""Backpropagation of the validation loss through position and velocity, one step at a time.

Every pass processes the parameters in chunks that fit into the cache. Nothing of the length of the
parameters is allocated after the start. Letters: P parameters, C of a chunk, G layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.hypergrad.fused import CHUNK
from ngsgd.hypergrad.step_limits import MoveAdjoint, Shortened, move_adjoint


class Velocity(NamedTuple):
    """v = values * scale, per layer; the values are integers or floats."""

    values_P: Tensor
    scale_G: Sequence[float]


class Adjoint:
    """Adjoints dw and dv in float64.

    Call `over_move`, `over_decay` and `over_gradient` in this order.
    """

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
        """Backpropagate through v = gamma v - (1 - gamma) d; sets z = (1 - gamma) dv.

        Returns:
            The gradient with respect to gamma, <dv, v + d>, G.
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
        """Backpropagate through d = gradient + l2 w.

        Args:
            by_w_P: product of the Jacobian of the gradient and z.
            w_P: weights.
            l2_G: l2 of each layer.

        Returns:
            The gradient with respect to l2, G.
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
