"""Outer optimizers in float64, one element and one job at a time, from the formulas of their
papers.

B broadcast model, W evaluated model, G mean move of the jobs from B. Every function takes the model
that a run starts from and G of each outer iteration, and returns (W, B) after each. Slow on
purpose, and nothing here is shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Path = list[tuple[Array, Array]]


def weighted_mean(vectors: Sequence[Array], weights: Sequence[float]) -> Array:
    """sum w_i x_i / sum w_i, correctly rounded sums."""
    total = math.fsum(weights)
    return np.array([math.fsum(w * float(x[element]) for w, x in zip(weights, vectors, strict=True)) / total
                     for element in range(len(vectors[0]))])


def block_momentum(model: Array, moves: Sequence[Array], etas: Sequence[float], zeta: float, *, nesterov: bool) -> Path:
    """Chen and Huo, ICASSP 2016: Delta_t = eta_t Delta_{t-1} + zeta G_t; W_t = W_{t-1} + Delta_t;
    B_t = W_t + eta_t Delta_t.
    """
    W, Delta, path = model.copy(), np.zeros_like(model), []
    for G, eta in zip(moves, etas, strict=True):
        B = W.copy()
        for element in range(len(model)):
            Delta[element] = eta * Delta[element] + zeta * G[element]
            W[element] += Delta[element]
            B[element] = W[element] + (eta * Delta[element] if nesterov else 0.0)
        path.append((W.copy(), B))
    return path


def diloco(model: Array, moves: Sequence[Array], lr: float, momentum: float) -> Path:
    """arXiv 2311.08105, Algorithm 1, with Nesterov's momentum as Sutskever et al. write it for a
    gradient -G.
    """
    theta, buffer, path = model.copy(), np.zeros_like(model), []
    for G in moves:
        for element in range(len(model)):
            gradient = -G[element]
            buffer[element] = momentum * buffer[element] + gradient
            theta[element] -= lr * (gradient + momentum * buffer[element])
        path.append((theta.copy(), theta.copy()))
    return path


def moving_average(models: Sequence[Array], decay: float) -> Array:
    """E = a_t E + (1 - a_t) W with a_t = min(decay, 1 - 1/t), t = 1, 2, ..: the mean of the models
    until that is long enough.
    """
    E = np.zeros_like(models[0])
    for t, W in enumerate(models, start=1):
        a = min(decay, 1.0 - 1.0 / t)
        E = a * E + (1.0 - a) * W
    return E
