"""Linear projections of spliced features: linear discriminants, then decorrelated classes (MLLT).

Letters: T frames, S spliced features, D projected features, C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ngsgd.asr.ivectors.model import spliced

Matrix = npt.NDArray[np.float64]

# classes with fewer frames have no covariance for MLLT
_MIN_FRAMES = 50
# passes of MLLT over all rows
_MLLT_ITERS = 20


def splice(x_TD: npt.NDArray[np.floating], context: int) -> Matrix:
    """Return each frame with its neighbors on both sides; edges repeat the first and last frame."""
    return np.asarray(spliced(x_TD, np.arange(len(x_TD)), context).numpy())


def lda(x_TS: Matrix, class_T: npt.NDArray[np.integer], dim: int) -> Matrix:
    """Return the directions that separate classes best.

    Returns:
        D x S matrix. The within-class covariance of projected features is the identity.

    Source: Haeb-Umbach and Ney, "Linear discriminant analysis for improved large vocabulary
    continuous speech recognition" (1992).
    """
    mean_CS, count_C = _means(x_TS, class_T)
    within_SS = _second_moment(x_TS - mean_CS[class_T]) / len(x_TS)
    return lda_of_moments(within_SS, mean_CS - x_TS.mean(axis=0), count_C, dim)


def lda_of_moments(within_SS: Matrix, mean_CS: Matrix, count_C: Matrix, dim: int) -> Matrix:
    """Return `lda` from the covariance within classes, and their means minus that of all frames."""
    centered_CS = mean_CS * np.sqrt(count_C / count_C.sum())[:, None]
    whitening_SS = np.linalg.inv(np.linalg.cholesky(within_SS))
    _, axes_SS = np.linalg.eigh(_second_moment(centered_CS @ whitening_SS.T))
    return np.asarray(axes_SS[:, ::-1][:, :dim].T @ whitening_SS)


def mllt(x_TD: Matrix, class_T: npt.NDArray[np.integer]) -> Matrix:
    """Return the D x D transform under which classes have the most nearly diagonal covariances.

    Rows are updated in turn, each to the maximum of the likelihood with the others fixed.

    Source: Gales, "Semi-tied covariance matrices for hidden Markov models" (1999).
    """
    mean_CD, count_C = _means(x_TD, class_T)
    x_TD = x_TD - mean_CD[class_T]
    kept = frequent(count_C)
    covariance_CDD = np.stack([_second_moment(x_TD[class_T == c]) / count_C[c] for c in kept])
    return mllt_of_covariances(covariance_CDD, count_C[kept])


def mllt_of_covariances(covariance_CDD: Matrix, count_C: Matrix) -> Matrix:
    """Return `mllt` from the covariances and numbers of frames of the classes."""
    transform_DD = np.eye(covariance_CDD.shape[1])
    for _ in range(_MLLT_ITERS):
        variance_CD = np.einsum("da,cab,db->cd", transform_DD, covariance_CDD, transform_DD, optimize=True)
        for row in range(len(transform_DD)):
            weight_C = count_C / variance_CD[:, row]
            moment_DD = np.tensordot(weight_C, covariance_CDD, axes=1)
            cofactors_D = np.linalg.inv(transform_DD)[:, row]
            direction_D = np.linalg.solve(moment_DD, cofactors_D)
            scale = np.sqrt(count_C.sum() / (cofactors_D @ direction_D))
            transform_DD[row] = scale * direction_D
    return transform_DD


def frequent(count_C: Matrix) -> npt.NDArray[np.int64]:
    """Return the classes with enough frames for a covariance, or the largest one."""
    kept = np.flatnonzero(count_C >= _MIN_FRAMES)
    return kept if len(kept) else np.array([count_C.argmax()])


def _means(x_TD: Matrix, class_T: npt.NDArray[np.integer]) -> tuple[Matrix, Matrix]:
    """Mean and number of frames of each class; classes without frames have mean 0."""
    count_C = np.bincount(class_T).astype(np.float64)
    sum_CD = np.stack([np.bincount(class_T, weights=column) for column in x_TD.T], axis=1)
    return sum_CD / np.maximum(count_C, 1.0)[:, None], count_C


def _second_moment(x_TD: Matrix) -> Matrix:
    return np.asarray(x_TD.T @ x_TD)
