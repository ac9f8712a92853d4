"""Maximum-likelihood Gaussians and mixtures by loops over frames and states."""

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


def em_pass(x_TK: Matrix, pdf_T: npt.NDArray[np.int32], pdf_G: npt.NDArray[np.int64], weight_G: Matrix, mean_GK: Matrix,
            variance_GK: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Weights, means and variances after a pass of EM with fixed pdfs; no floor, none removed."""
    post_TG = np.zeros((len(x_TK), len(pdf_G)))
    for t, x_K in enumerate(x_TK):
        for g in range(len(pdf_G)):
            if pdf_G[g] == pdf_T[t]:
                density = np.exp(-0.5 * (x_K - mean_GK[g]) ** 2 / variance_GK[g]) / np.sqrt(2 * math.pi * variance_GK[g])
                post_TG[t, g] = weight_G[g] * density.prod()
        post_TG[t] /= post_TG[t].sum()
    count_G = post_TG.sum(axis=0)
    means = np.stack([sum(post_TG[t, g] * x_K for t, x_K in enumerate(x_TK)) / count_G[g] for g in range(len(pdf_G))])
    variances = np.stack([sum(post_TG[t, g] * (x_K - means[g]) ** 2 for t, x_K in enumerate(x_TK)) / count_G[g]
                          for g in range(len(pdf_G))])
    of_pdf_G = np.array([count_G[pdf_G == pdf].sum() for pdf in pdf_G])
    return count_G / of_pdf_G, means, variances
