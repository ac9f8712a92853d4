"""Fixed affine transform of the input (C.6 of arXiv 1410.7455).

It decorrelates the input and down-weights non-discriminative dimensions: an LDA that keeps all
dimensions by default, with a mild floor instead of full whitening; Kaldi's
nnet2/get-feature-transform.cc. Letters: D inputs, K outputs, P classes; T total, B between-class, W
within-class covariance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.data.reader import Minibatch
from ngsgd.errors import DataError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of rows with classes; float64."""

    count_P: Array
    # covariance of all rows
    total_DD: Array
    # covariance of the class means, weighted by their counts
    between_DD: Array
    mean_D: Array


def class_statistics(minibatches: Iterable[Minibatch], num_classes: int, columns: npt.NDArray[np.int64]) -> ClassStatistics:
    """Compute statistics over all rows for these columns, weighted by the weight of each row."""
    dim = len(columns)
    count_P, sum_PD, square_DD = np.zeros(num_classes), np.zeros((num_classes, dim)), np.zeros((dim, dim))
    for x_ND, pdf_N, weight_N in minibatches:
        rows_ND = x_ND.numpy()[:, columns].astype(np.float64)
        weights_N = np.ones(len(rows_ND)) if weight_N is None else weight_N.numpy().astype(np.float64)
        member_NP = np.eye(num_classes)[pdf_N.numpy()] * weights_N[:, None]
        count_P += member_NP.sum(axis=0)
        sum_PD += member_NP.T @ rows_ND
        square_DD += rows_ND.T @ (rows_ND * weights_N[:, None])
    total = count_P.sum()
    mean_D = sum_PD.sum(axis=0) / total
    seen = count_P > 0.0
    class_mean = sum_PD[seen] / count_P[seen, None] - mean_D
    between_DD = (class_mean * (count_P[seen, None] / total)).T @ class_mean
    return ClassStatistics(count_P, square_DD / total - np.outer(mean_D, mean_D), between_DD, mean_D)


def lda_transform(total_DD: Array, between_DD: Array, mean_D: Array, *, within_class_factor: float = 0.001,
                  max_singular_value: float = 5.0, dim: int = 0) -> Array:
    """Compute the transform, K x (D + 1) with the offset last.

    The sign of each row is arbitrary.

    With W = T - B = L L^T and the eigenvalues l of L^-1 B L^-T = U diag(l) U^T, descending, row i
    of U^T L^-1 is scaled by sqrt((f + l_i) / (1 + l_i)).

    Args:
        total_DD: covariance of all rows.
        between_DD: covariance of the class means.
        mean_D: mean of all rows.
        within_class_factor: f.
        max_singular_value: upper limit of the singular values; 0: none.
        dim: number of rows to keep; 0: all.

    Raises:
        DataError: W is singular.
    """
    try:
        L_DD = np.linalg.cholesky(total_DD - between_DD)
    except np.linalg.LinAlgError:
        raise DataError("the input transform cannot be computed, because some combination of features never varies within a "
                        "class; use more data, or set model.input_transform=none.") from None
    half_DD = np.linalg.solve(L_DD, between_DD)
    l_D, U_DD = np.linalg.eigh(np.linalg.solve(L_DD, half_DD.T))
    # eigh returns ascending eigenvalues.
    kept = slice(None, None, -1) if dim == 0 else slice(None, -dim - 1, -1)
    l_K, M_KD = np.maximum(l_D[kept], 0.0), np.linalg.solve(L_DD.T, U_DD[:, kept]).T  # U^T L^-1
    M_KD *= np.sqrt((within_class_factor + l_K) / (1.0 + l_K))[:, None]
    if max_singular_value > 0.0:
        left, singular, right = np.linalg.svd(M_KD, full_matrices=False)
        M_KD = (left * np.minimum(singular, max_singular_value)) @ right
    return np.hstack([M_KD, -(M_KD @ mean_D)[:, None]])
