"""One step of Kaldi's orthonormality constraint in float64, as its comment in nnet3/nnet-utils.cc
derives it.

The objective is tr(Q Q^T) with Q = P - s^2 I and P = M M^T; its gradient with respect to M is 4 Q
M. Slow on purpose, and nothing here is shared with the package.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

UPDATE_SPEED = 0.125


def one_step(weight: Array, scale: float) -> Array:
    """`weight` after one step; a matrix of more rows than columns is constrained by columns."""
    if weight.shape[0] > weight.shape[1]:
        return one_step(weight.T, scale).T
    M, num_rows = weight, weight.shape[0]
    P = np.array([[float(np.dot(M[i], M[j])) for j in range(num_rows)] for i in range(num_rows)])
    speed = UPDATE_SPEED
    if scale < 0.0:
        trace_P = sum(P[i, i] for i in range(num_rows))
        trace_PP = sum(P[i, j] ** 2 for i in range(num_rows) for j in range(num_rows))
        scale = float(np.sqrt(trace_PP / trace_P))  # makes the objective's gradient orthogonal to M
        ratio = trace_PP * num_rows / trace_P**2
        if ratio > 1.02:
            speed *= 0.5
            if ratio > 1.1:
                speed *= 0.5
    Q = P - scale**2 * np.eye(num_rows)
    gradient = 4.0 * Q @ M
    return np.asarray(M - speed / scale**2 * gradient)


def deviation(weight: Array, scale: float) -> float:
    """The largest |singular value / scale - 1|; scale < 0: relative to their RMS."""
    sigma = np.linalg.svd(weight, compute_uv=False)
    wanted = scale if scale > 0.0 else float(np.sqrt(np.mean(sigma**2)))
    return float(np.abs(sigma / wanted - 1.0).max())
