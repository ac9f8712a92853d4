"""The final combination by its definitions in float64: explicit loops, finite differences, dense
matrices.

Running mean: Kaldi's nnet3-combine. Weights per model and layer: C.4 of arXiv 1410.7455 and Kaldi's
nnet-combine-fast. Slow on purpose; nothing here is shared with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def running_means(models: Sequence[Array]) -> dict[int, Array]:
    """n -> the mean of the first n models."""
    return {n: np.array([sum(float(model[p]) for model in models[:n]) / n for p in range(len(models[0]))])
            for n in range(1, len(models) + 1)}


def combined(models: Sequence[Array], layer_of: Sequence[int], weights: Array) -> Array:
    """Entry p is sum over models k of weights[k, layer_of[p]] * models[k][p]."""
    return np.array([sum(weights[k, layer] * float(model[p]) for k, model in enumerate(models))
                     for p, layer in enumerate(layer_of)])


def two_layer_objf(theta: Array, X: Array, pdf: npt.NDArray[np.int64], num_hidden: int, num_classes: int) -> float:
    """Sum over frames of log softmax(V tanh(W x + b) + c)[pdf]; theta is W, b, V, c, row by row."""
    dim, first = X.shape[1], 0
    parts = []
    for shape in ((num_hidden, dim), (num_hidden,), (num_classes, num_hidden), (num_classes,)):
        size = int(np.prod(shape))
        parts.append(theta[first:first + size].reshape(shape))
        first += size
    W, b, V, c = parts
    total = 0.0
    for x, label in zip(X, pdf, strict=True):
        logits = V @ np.tanh(W @ x + b) + c
        total += float(logits[label] - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max())
    return total


def finite_difference_gradient(objf: Callable[[Array], float], weights: Array, step: float = 1e-5) -> Array:
    """Central differences; the error is of order step^2 and 1e-16 / step."""
    gradient = np.empty_like(weights)
    for index in np.ndindex(*weights.shape):
        changed = []
        for sign in (1.0, -1.0):
            moved = weights.copy()
            moved[index] += sign * step
            changed.append(objf(moved))
        gradient[index] = (changed[0] - changed[1]) / (2.0 * step)
    return gradient


def scatter(gradients: Sequence[Array]) -> Array:
    """Sum of g g^T."""
    size = gradients[0].size
    total = np.zeros((size, size))
    for gradient in gradients:
        for i, a in enumerate(gradient.reshape(-1)):
            for j, b in enumerate(gradient.reshape(-1)):
                total[i, j] += a * b
    return total


def smoothed_scatter(F: Array) -> Array:
    """Trace brought to the dimension, diagonal floored at 1e-20 and times 1.01."""
    size = len(F)
    trace = sum(F[i, i] for i in range(size))
    F = F * (size / trace)
    for i in range(size):
        F[i, i] = max(F[i, i], 1e-20) * 1.01
    return F


def bfgs_direction(gradient: Array, pairs: Sequence[tuple[Array, Array]], scale: float) -> Array:
    """H g with the dense BFGS matrix over all (s, y), oldest first (Nocedal and Wright, 6.17)."""
    identity = np.eye(len(gradient))
    H = scale * identity
    for s, y in pairs:
        rho = 1.0 / float(np.dot(y, s))
        V = identity - rho * np.outer(y, s)
        H = V.T @ H @ V + rho * np.outer(s, s)
    return np.asarray(H @ gradient)


def pooled_statistics(X: Array) -> tuple[Array, Array]:
    """(mean, unbiased variance) of each column, by two loops over all rows."""
    mean = np.array([sum(float(v) for v in column) / len(column) for column in X.T])
    variance = np.array([sum((float(v) - m) ** 2 for v in column) / (len(column) - 1)
                         for column, m in zip(X.T, mean, strict=True)])
    return mean, variance


def newton_maximum(X: Array, pdf: npt.NDArray[np.int64], matrices: Sequence[Array], steps: int = 50) -> tuple[Array, float]:
    """(weights, objf per frame) at the maximum of mean log softmax((sum_k w_k M_k) x)[pdf]."""
    weights = np.full(len(matrices), 1.0 / len(matrices))
    for _ in range(steps):
        gradient, hessian = np.zeros(len(weights)), np.zeros((len(weights), len(weights)))
        for x, label in zip(X, pdf, strict=True):
            A = np.stack([M @ x for M in matrices], axis=1)  # logits = A w
            p = np.exp(A @ weights - np.max(A @ weights))
            p /= p.sum()
            gradient += A[label] - p @ A
            hessian -= A.T @ (np.diag(p) - np.outer(p, p)) @ A
        weights = weights - np.linalg.solve(hessian, gradient)
    objf = 0.0
    for x, label in zip(X, pdf, strict=True):
        logits = sum(w * (M @ x) for w, M in zip(weights, matrices, strict=True))
        objf += float(logits[label] - np.log(np.sum(np.exp(logits))))
    return weights, objf / len(pdf)
