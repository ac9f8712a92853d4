"""The hold-one-out natural gradient (arXiv 1410.7455, appendix A): a D x D inverse for each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def precondition_by_definition(X: Array, alpha: float) -> Array:
    """Rows times the inverse Fisher matrix of the others, rescaled to the norm of X."""
    N, D = X.shape
    lam = alpha / (N * D) * np.trace(X @ X.T)                                          # (8)
    Xhat = np.empty_like(X)
    for i in range(N):
        # (9)
        G_i = sum((np.outer(X[j], X[j]) for j in range(N) if j != i), np.zeros((D, D))) / (N - 1) + lam * np.eye(D)
        Xhat[i] = np.linalg.inv(G_i) @ X[i]                                            # (10)
    gamma = np.sqrt(np.trace(X @ X.T) / np.trace(Xhat @ Xhat.T))                       # (12)
    return np.asarray(gamma * Xhat)                                                    # (11)
