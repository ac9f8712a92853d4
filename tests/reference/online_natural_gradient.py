"""Online natural gradient with dense D x D matrices in float64, line by line from Appendix B of
arXiv 1410.7455.

Slow on purpose; nothing here is shared with the package. Differences between Kaldi and the paper
are marked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class DenseFisher:
    """F = R^T diag(d) R + rho I with orthonormal rows R."""

    def __init__(self, R: Array, d: Array, rho: float, *, alpha: float, epsilon: float = 1e-10, delta: float = 5e-4) -> None:
        self.R, self.d, self.rho = R, d, rho
        self.alpha, self.epsilon, self.delta = alpha, epsilon, delta

    @classmethod
    def from_w(cls, W: Array, d: Array, rho: float, *, alpha: float) -> DenseFisher:
        """From W = E^(1/2) R (43, 44)."""
        D = W.shape[1]
        beta = rho * (1 + alpha) + alpha / D * d.sum()
        return cls(W / np.sqrt(1 / (beta / d + 1))[:, None], d, rho, alpha=alpha)

    @property
    def F(self) -> Array:  # noqa: N802  the paper's symbol
        return self.R.T @ np.diag(self.d) @ self.R + self.rho * np.eye(self.R.shape[1])  # (18)

    @property
    def W(self) -> Array:  # noqa: N802
        beta = self.rho * (1 + self.alpha) + self.alpha / self.R.shape[1] * self.d.sum()
        return np.asarray(np.sqrt(1 / (beta / self.d + 1))[:, None] * self.R)

    def precondition(self, X: Array) -> tuple[Array, float]:
        """(Xhat, gamma): (19), (36), (38)."""
        D = X.shape[1]
        G = self.F + self.alpha / D * np.trace(self.F) * np.eye(D)
        beta = self.rho * (1 + self.alpha) + self.alpha / D * self.d.sum()
        Xhat = beta * X @ np.linalg.inv(G)
        return Xhat, float(np.sqrt(np.sum(X**2) / np.sum(Xhat**2)))

    def update(self, X: Array, eta: float) -> None:
        """(22) to (30); floors and the unfloored rho in d are Kaldi's."""
        N, D = X.shape
        S = X.T @ X / N                                            # (22)
        T = eta * S + (1 - eta) * self.F                           # (23)
        Y = self.R @ T                                             # (24)
        c, U = np.linalg.eigh(Y @ Y.T)                             # (25, 26)
        c, U = c[::-1], U[:, ::-1]
        c = np.maximum(c, ((1 - eta) * self.rho) ** 2)
        self.R = np.diag(c**-0.5) @ U.T @ Y                        # (27)
        rho = (np.trace(T) - np.sqrt(c).sum()) / (D - len(c))      # (29)
        # Kaldi; the paper has epsilon alone (30)
        floor = max(self.epsilon, self.delta * np.sqrt(c).max())
        self.d = np.maximum(np.sqrt(c) - rho, floor)               # (28) with rho before its floor
        self.rho = max(rho, floor)


class DensePolar(DenseFisher):
    """Without the floor of each single eigenvalue; a bound of the largest one is in that of rho."""

    def update(self, X: Array, eta: float) -> None:
        N, D = X.shape
        T = eta * X.T @ X / N + (1 - eta) * self.F
        Y = self.R @ T
        c, U = np.linalg.eigh(Y @ Y.T)
        S = U @ np.diag(np.sqrt(c)) @ U.T
        rho = (np.trace(T) - np.trace(S)) / (D - len(c))
        self.R = np.diag(c**-0.5) @ U.T @ Y
        self.d = np.sqrt(c) - rho
        self.rho = max(rho, self.epsilon, 5e-4 * float(np.sum(c**4)) ** 0.125)
