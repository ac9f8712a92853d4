"""Maximum-likelihood Gaussians by loops over frames and states."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def log_likelihood(x_TK: Matrix, train_TK: Matrix, pdf_T: npt.NDArray[np.int32], num_pdfs: int, *, floor: float,
                   fewest: int) -> Matrix:
    """T x P: log density of rows under a diagonal Gaussian of each state's training frames."""
    result = np.empty((len(x_TK), num_pdfs))
    for pdf in range(num_pdfs):
        mine = [row for row, state in zip(train_TK, pdf_T, strict=True) if state == pdf]
        rows = np.array(mine if len(mine) >= fewest else train_TK)
        for t, x_K in enumerate(x_TK):
            total = 0.0
            for k, x in enumerate(x_K):
                mean = sum(rows[:, k]) / len(rows)
                variance = sum((rows[:, k] - mean) ** 2) / len(rows)
                variance = max(variance, floor * float(np.var(train_TK[:, k])))
                total += -0.5 * (math.log(2 * math.pi * variance) + (x - mean) ** 2 / variance)
            result[t, pdf] = total
    return result
