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


def float32_mean(vectors: Sequence[npt.NDArray[np.float32]], weights: Sequence[float]) -> npt.NDArray[np.float32]:
    """The bits that the package promises: a sum in float64 in the order of jobs, rounded once."""
    total = np.zeros(len(vectors[0]))
    for number, (w, x) in enumerate(zip(weights, vectors, strict=True)):
        term = x.astype(np.float64) * (w / float(sum(weights)))
        # not 0 + term, which would make a zero of -0
        total = total + term if number else term
    return total.astype(np.float32)


def block_momentum(model: Array, moves: Sequence[Array], etas: Sequence[float], zeta: float, *, nesterov: bool) -> Path:
    """Chen and Huo 2016: Delta = eta Delta + zeta G; W = W + Delta; B = W + eta Delta."""
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
    """arXiv 2311.08105, Algorithm 1, with Nesterov's momentum for a gradient -G."""
    theta, buffer, path = model.copy(), np.zeros_like(model), []
    for G in moves:
        for element in range(len(model)):
            gradient = -G[element]
            buffer[element] = momentum * buffer[element] + gradient
            theta[element] -= lr * (gradient + momentum * buffer[element])
        path.append((theta.copy(), theta.copy()))
    return path


def moving_average(models: Sequence[Array], decay: float) -> Array:
    """E = a_t E + (1 - a_t) W with a_t = min(decay, 1 - 1/t), t = 1, 2, .."""
    E = np.zeros_like(models[0])
    for t, W in enumerate(models, start=1):
        a = min(decay, 1.0 - 1.0 / t)
        E = a * E + (1.0 - a) * W
    return E
