"""ScaledAdam of icefall, one tensor and one step after the other in float64, and its schedules.

Written from the formulas: t counts steps from 0, and every fourth step changes the scale of a
tensor. Nothing here is shared with ngsgd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class ScaledAdamByDefinition:
    """Parameters by name, changed by `step`; `clipped` lists the clipping factors."""

    def __init__(self, params: Mapping[str, Array], clipping_scale: float = 2.0, betas: tuple[float, float] = (0.9, 0.98),
                 eps: float = 1e-8) -> None:
        self.params = {name: np.array(p, dtype=np.float64) for name, p in params.items()}
        self.clipping_scale, self.betas, self.eps = clipping_scale, betas, eps
        self.m = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.v = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.r = {name: math.sqrt(float(np.mean(p ** 2))) for name, p in self.params.items()}
        self.V = dict.fromkeys(self.params, 0.0)
        self.last_s: dict[str, list[float]] = {name: [] for name in self.params}
        self.norms: list[float] = []
        self.threshold: float | None = None
        self.clipped: list[float] = []
        self.t = 0

    def step(self, gradients: Mapping[str, Array], lr: float) -> None:
        factor = self._clip(gradients)
        self.clipped.append(factor)
        for name, p in self.params.items():
            g = gradients[name] * factor if factor > 0.0 else np.zeros_like(p)
            d = self._scalar(name, g, lr) if p.size == 1 else self._tensor(name, g, lr)
            self.m[name] = self.betas[0] * self.m[name] + (1.0 - self.betas[0]) * d
            self.params[name] = p + self.m[name]
            if p.size == 1:
                self.params[name] = np.clip(self.params[name], -10.0, 10.0)
        self.t += 1

    def _adam(self, name: str, g: Array, lr: float) -> Array:
        beta_2 = self.betas[1]
        self.v[name] = beta_2 * self.v[name] + (1.0 - beta_2) * g ** 2
        divisor = 1.0 - beta_2 ** (self.t + 1)
        v_hat = self.v[name] / divisor if divisor < 0.99 else self.v[name]
        return np.asarray(-lr * g / (np.sqrt(v_hat) + self.eps))

    def _scalar(self, name: str, g: Array, lr: float) -> Array:
        return self._adam(name, g, 0.1 * lr)

    def _tensor(self, name: str, g: Array, lr: float) -> Array:
        p = self.params[name]
        d = self._adam(name, g, lr)
        self.last_s[name] = [*self.last_s[name], float(np.sum(p * g))][-4:]
        fourth = self.t % 4 == 3
        if fourth:
            self.r[name] = math.sqrt(float(np.mean(p ** 2)))
        d = d * max(self.r[name], 1e-5)
        return d + p * self._scale_change(name, lr) if fourth else d

    def _scale_change(self, name: str, lr: float) -> float:
        b, k, s, r = self.betas[1] ** 4, (self.t + 1) // 4, self.last_s[name], self.r[name]
        self.V[name] = b * self.V[name] + (1.0 - b) * sum(x * x for x in s) / 4.0
        q = -0.1 * lr * math.sqrt(1.0 - b ** k) * sum(s) / (math.sqrt(self.V[name]) + self.eps)
        q = 0.0 if r < 1e-5 else min(max(q, -0.1), 0.1)
        return min(q, (3.0 - r) / r) if r > 0.0 else q

    def _clip(self, gradients: Mapping[str, Array]) -> float:
        squares = sum(float(np.sum((g * (0.1 if g.size == 1 else self.r[name])) ** 2)) for name, g in gradients.items())
        n = math.sqrt(squares)
        if self.t > 0:
            self.norms.append(n)
        if self.clipping_scale and self.t > 0 and (self.t in (10, 20, 40) or self.t % 100 == 0):
            # NaN is larger than every number
            recent = sorted(n if math.isfinite(n) else math.inf for n in self.norms[-100:])
            self.threshold = self.clipping_scale * recent[len(recent) // 4 * 2] * (2.0 if self.t < 100 else 1.0)
        if not math.isfinite(n):
            return 0.0
        return 1.0 if self.threshold is None else min(1.0, self.threshold / (n + 1e-20))


def eden(base: float, batch: float, epoch: float, lr_batches: float, lr_epochs: float) -> float:
    """The rate of Eden without warm-up."""
    of_batches = (batch * batch + lr_batches * lr_batches) / (lr_batches * lr_batches)
    of_epochs = (epoch * epoch + lr_epochs * lr_epochs) / (lr_epochs * lr_epochs)
    return float(base / (of_batches * of_epochs) ** 0.25)
