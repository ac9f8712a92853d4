"""AdamW (Loshchilov and Hutter 2019, algorithm 2) in float64, line by line. Nothing here is shared
with the package.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class AdamW:
    """One parameter."""

    def __init__(self, x: Array, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.x, self.betas, self.eps = x.copy(), betas, eps
        self.m, self.v, self.t = np.zeros_like(x), np.zeros_like(x), 0

    def step(self, g: Array, lr: float, weight_decay: float) -> None:
        beta1, beta2 = self.betas
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        m_hat, v_hat = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        self.x = self.x - lr * (m_hat / (np.sqrt(v_hat) + self.eps) + weight_decay * self.x)
