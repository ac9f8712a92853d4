"""Feature-space maximum likelihood linear regression (fMLLR): one affine transform per speaker.

The transform y = A x + b maximizes the likelihood of a speaker's frames under given Gaussians.
W = [A b] is updated row by row.

Source: Gales, "Maximum likelihood linear transformations for HMM-based speech recognition" (1998).

Letters: T frames, D features, E = D + 1 (features and a constant 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

# passes over all rows
NUM_ITERS = 10
# bounds memory: frames x E x E
_FRAMES_AT_ONCE = 2048


@dataclass
class FmllrStats:
    """Sums of one speaker.

    Attributes:
        count: frames.
        linear_DE: sum of mean / variance times [x 1].
        square_DEE: sum of 1 / variance times [x 1][x 1]^T.
    """

    count: float
    linear_DE: Matrix
    square_DEE: Matrix

    @classmethod
    def zero(cls, num_features: int) -> FmllrStats:
        """Sums of no frames."""
        d, e = num_features, num_features + 1
        return cls(0.0, np.zeros((d, e)), np.zeros((d, e, e)))

    def plus(self, other: FmllrStats, factor: float = 1.0) -> FmllrStats:
        """Return these sums with those of other frames, which count `factor` times."""
        return FmllrStats(self.count + factor * other.count,
                          self.linear_DE + factor * other.linear_DE,
                          self.square_DEE + factor * other.square_DEE)

    def add(self, x_TD: Matrix, precision_TD: Matrix, mean_TD: Matrix) -> None:
        """Add frames.

        Args:
            x_TD: features before the transform.
            precision_TD: sum over Gaussians of posterior / variance.
            mean_TD: sum over Gaussians of posterior * mean / variance.
        """
        self.count += len(x_TD)
        for start in range(0, len(x_TD), _FRAMES_AT_ONCE):
            part = slice(start, start + _FRAMES_AT_ONCE)
            x_TE = np.concatenate([x_TD[part], np.ones((len(x_TD[part]), 1))], axis=1)
            outer = np.einsum("ta,tb->tab", x_TE, x_TE).reshape(len(x_TE), -1)
            self.linear_DE += mean_TD[part].T @ x_TE
            self.square_DEE += (precision_TD[part].T @ outer).reshape(self.square_DEE.shape)

    def estimate(self) -> Matrix:
        """Return W = [A b] (D x E), starting from the identity.

        The sums must be of more than D frames, so that every row has one solution.
        """
        w_DE = np.eye(*self.linear_DE.shape)
        inverse_DEE = np.linalg.inv(self.square_DEE)
        for _ in range(NUM_ITERS):
            for row, inverse_EE in enumerate(inverse_DEE):
                cofactors_E = np.append(np.linalg.inv(w_DE[:, :-1])[:, row], 0.0)
                w_DE[row] = self._row(cofactors_E, self.linear_DE[row], inverse_EE)
        return w_DE

    def _row(self, cofactors_E: Matrix, linear_E: Matrix, inverse_EE: Matrix) -> Matrix:
        """The best row for these cofactors: the root of a quadratic with the larger likelihood."""
        a = float(cofactors_E @ inverse_EE @ cofactors_E)
        b = float(cofactors_E @ inverse_EE @ linear_E)
        root = np.sqrt(b * b + 4.0 * a * self.count)
        candidates = ((-b + root) / (2.0 * a), (-b - root) / (2.0 * a))
        best = max(candidates,
                   key=lambda c: self.count * np.log(abs(c * a + b)) - 0.5 * c * c * a)
        return np.asarray((best * cofactors_E + linear_E) @ inverse_EE)

    def log_likelihood(self, w_DE: Matrix) -> float:
        """Return the part of the log-likelihood that depends on the transform."""
        quadratic = np.einsum("de,def,df->", w_DE, self.square_DEE, w_DE)
        volume = self.count * np.linalg.slogdet(w_DE[:, :-1])[1]
        return float(volume + (w_DE * self.linear_DE).sum() - 0.5 * quadratic)


def apply(w_DE: Matrix, x_TD: Matrix) -> Matrix:
    """Return A x + b of each frame."""
    return np.asarray(x_TD @ w_DE[:, :-1].T + w_DE[:, -1])
