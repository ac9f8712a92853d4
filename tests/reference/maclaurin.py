"""Reversible momentum as published (Algorithm 3 of arXiv 1502.03492), with its errors fixed: a
reference implementation.

A velocity of integers c is multiplied by n/d exactly: the remainder of c by d goes into a buffer i,
and the digits that the product by n lacks come out of it. The buffer is one int64 per parameter;
before it can overflow its low 32 bits are put aside. gamma is rounded to n/2^16, and (1 - gamma)
uses the rounded one.
"""

from __future__ import annotations

import torch
from torch import Tensor

FRACTION = 2.0 ** 52
DENOMINATOR = 1 << 16
FULL = 1 << 46  # times 2^16 plus a remainder still fits into 63 bits


class MaclaurinMomentum:
    """v = gamma v - (1 - gamma) g; w += rate v; and back.  One layer."""

    def __init__(self, weights: Tensor) -> None:
        self.x_P = (weights.double() * FRACTION).round().long()
        self.v_P = torch.zeros_like(self.x_P)
        self.buffer_P = torch.zeros_like(self.x_P)
        self.spills: list[tuple[int, Tensor]] = []
        self.num_steps = 0

    def step(self, grad_P: Tensor, rate: float, gamma: float) -> None:
        numerator = round(gamma * DENOMINATOR)
        if int(self.buffer_P.max()) >= FULL:
            self.spills.append((self.num_steps, (self.buffer_P & 0xFFFFFFFF).to(torch.int32)))
            self.buffer_P >>= 32
        self._multiply(numerator, DENOMINATOR)
        self.v_P -= self._impulse(grad_P, numerator)
        self.x_P += (self.v_P.double() * rate).round().long()
        self.num_steps += 1

    def undo_x(self, rate: float) -> None:
        self.x_P -= (self.v_P.double() * rate).round().long()

    def undo_v(self, grad_P: Tensor, gamma: float) -> None:
        numerator = round(gamma * DENOMINATOR)
        self.v_P += self._impulse(grad_P, numerator)
        self._multiply(DENOMINATOR, numerator)
        self.num_steps -= 1
        if self.spills and self.spills[-1][0] == self.num_steps:
            self.buffer_P = (self.buffer_P << 32) | (self.spills.pop()[1].long() & 0xFFFFFFFF)

    def weights(self) -> Tensor:
        """float64."""
        return self.x_P.double() / FRACTION

    def _impulse(self, grad_P: Tensor, numerator: int) -> Tensor:
        return (grad_P.double() * (FRACTION * (1.0 - numerator / DENOMINATOR))).round().long()

    def _multiply(self, n: int, d: int) -> None:
        """v = v n/d, exactly: i = i d + v mod d; v = (v div d) n + i mod n; i = i div n."""
        self.buffer_P = self.buffer_P * d + self.v_P % d
        self.v_P = torch.div(self.v_P, d, rounding_mode="floor") * n + self.buffer_P % n
        self.buffer_P = torch.div(self.buffer_P, n, rounding_mode="floor")
