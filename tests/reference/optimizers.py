"""AdamW, and orthogonalized momentum of natural gradients, in float64 and with dense matrices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class AdamW:
    """One parameter (Loshchilov and Hutter 2019, algorithm 2)."""

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


def newton_schulz(u: Array, num_steps: int) -> Array:
    """Muon's polynomial, applied to the singular values of u divided by its Frobenius norm."""
    left, s, right = np.linalg.svd(u / np.linalg.norm(u), full_matrices=False)
    for _ in range(num_steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return np.asarray(left * s @ right)


class NaturalMuon:
    """The weight of one linear layer; W_in (R x I) and W_out (R x O) are the W of (44)."""

    def __init__(self, weight_OI: Array, momentum: float) -> None:
        self.weight, self.momentum, self.m = weight_OI.copy(), momentum, np.zeros_like(weight_OI)

    def step(self, gradient_OI: Array, W_in: Array, W_out: Array, lr: float, weight_decay: float, num_steps: int = 5) -> None:
        num_outputs, num_inputs = self.weight.shape
        self.m = self.momentum * self.m + gradient_OI
        u = gradient_OI + self.momentum * self.m
        u = (np.eye(num_outputs) - W_out.T @ W_out) @ u @ (np.eye(num_inputs) - W_in.T @ W_in)
        direction = newton_schulz(u, num_steps)
        self.weight = (1 - lr * weight_decay) * self.weight - lr * 0.2 * np.sqrt(max(num_outputs, num_inputs)) * direction
