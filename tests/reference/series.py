"""Directions of methods without a matrix, from dense D x D matrices and explicit sums in float64.

Nothing here is shared with ngsgd. Letters: D parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def krylov(C: Tensor, g: Tensor, damping: float, dimension: int, last: Tensor | None) -> Tensor:
    """Minimum of the quadratic model over the span of g, C g, .. and the last direction."""
    damped = C + damping * torch.eye(len(C), dtype=C.dtype)
    powers = [g / g.norm()]
    for _ in range(dimension - 1):
        powers.append(damped @ powers[-1])
        powers[-1] = powers[-1] / powers[-1].norm()
    basis, _ = torch.linalg.qr(torch.stack([*powers, *([] if last is None else [last / last.norm()])], dim=1))
    values, U = torch.linalg.eigh(basis.T @ damped @ basis)
    found: Tensor = basis @ U @ (values.abs().clamp(min=damping).reciprocal() * (U.T @ (basis.T @ g)))
    return found


def neumann_series(C: Tensor, g: Tensor, damping: float, num_terms: int, scale: float) -> Tensor:
    """1/s times the sum of the powers 0 .. num_terms of (I - (C + d I) / s), applied to g."""
    identity = torch.eye(len(C), dtype=C.dtype)
    step = identity - (C + damping * identity) / scale
    total = torch.stack([torch.linalg.matrix_power(step, power) for power in range(num_terms + 1)]).sum(dim=0)
    found: Tensor = total @ g / scale
    return found


def neumann_steps(gradients: Sequence[Tensor], thetas: Sequence[Tensor], *, attraction: float, repulsion: float,
                  decay: float, least: float, resets: set[int]) -> list[Tensor]:
    """Directions of the Neumann optimizer at learning rate 1, by the lines of algorithm 2."""
    v, n, found = thetas[0], torch.zeros_like(thetas[0]), []
    for t, (g, theta) in enumerate(zip(gradients, thetas, strict=True)):
        v = theta + decay * (v - theta)
        mu = min(max(1.0 - 1.0 / (1.0 + t), 0.5), 0.9)
        if t in resets:
            d, n = g, -g
        else:
            r = max(float((theta - v).norm()), least)
            d = g + (attraction * r**2 - repulsion * len(g) / r**2) * (theta - v) / r
            n = mu * n - d
        found.append(d - mu * n)
    return found
