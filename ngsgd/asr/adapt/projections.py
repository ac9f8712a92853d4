"""Linear projections of spliced features: linear discriminants, then decorrelated classes (MLLT).

Those of large corpora are estimated from sums over utterances, which are read in two passes; the
result is the same up to rounding.

Letters: T frames, S spliced features, D projected features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.asr.ivectors.model import spliced

Matrix = npt.NDArray[np.float64]
# spliced features of an utterance, and the classes of its frames
Piece = tuple[Matrix, npt.NDArray[np.integer]]

# about three hours; the spliced features of smaller corpora are in memory at once
FRAMES_AT_ONCE = 1 << 20
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


# Large corpora ------------------------------------------------------------------------------------


class _Moments(NamedTuple):
    """Means and covariances of the first pass."""

    count_C: Matrix
    # minus the mean of all frames
    mean_CS: Matrix
    mean_S: Matrix
    total_SS: Matrix

    @property
    def within(self) -> Matrix:
        weighted_CS = self.mean_CS * np.sqrt(self.count_C / self.count_C.sum())[:, None]
        return np.asarray(self.total_SS - weighted_CS.T @ weighted_CS)


def projection(pieces: Callable[[], Iterable[Piece]], num_classes: int, dim: int) -> tuple[Matrix, Matrix]:
    """Estimate LDA and MLLT, scaled to unit variance; `pieces` is called twice.

    Returns:
        D x S matrix, and the mean of the S features.
    """
    moments = _moments(pieces(), num_classes)
    lda_DS = lda_of_moments(moments.within, moments.mean_CS, moments.count_C, dim)
    kept = frequent(moments.count_C)
    centered = ((x_TS - moments.mean_S, class_T) for x_TS, class_T in pieces())
    square_CDD = _squares(((x_TS @ lda_DS.T, class_T) for x_TS, class_T in centered), kept, dim)
    mean_CD = moments.mean_CS[kept] @ lda_DS.T
    covariance_CDD = square_CDD / moments.count_C[kept, None, None] - mean_CD[:, :, None] * mean_CD[:, None]
    matrix_DS = mllt_of_covariances(covariance_CDD, moments.count_C[kept]) @ lda_DS
    variance_D = np.einsum("ds,st,dt->d", matrix_DS, moments.total_SS, matrix_DS, optimize=True)
    return matrix_DS / np.sqrt(variance_D)[:, None], moments.mean_S


def _moments(pieces: Iterable[Piece], num_classes: int) -> _Moments:
    count_C = np.zeros(num_classes)
    sum_CS, square_SS = np.zeros((num_classes, 0)), np.zeros((0, 0))
    for x_TS, class_T in pieces:
        if not sum_CS.size:
            sum_CS, square_SS = np.zeros((num_classes, x_TS.shape[1])), np.zeros((x_TS.shape[1],) * 2)
        square_SS += x_TS.T @ x_TS
        for number, rows_NS in _by_class(x_TS, class_T):
            count_C[number] += len(rows_NS)
            sum_CS[number] += rows_NS.sum(axis=0)
    mean_S = sum_CS.sum(axis=0) / count_C.sum()
    mean_CS = np.where(count_C[:, None] > 0, sum_CS / np.maximum(count_C, 1.0)[:, None] - mean_S, 0.0)
    return _Moments(count_C, mean_CS, mean_S, square_SS / count_C.sum() - np.outer(mean_S, mean_S))


def _squares(pieces: Iterable[Piece], kept: npt.NDArray[np.int64], dim: int) -> Matrix:
    """Sum of outer products of the frames of each of the kept classes."""
    place = {int(number): at for at, number in enumerate(kept)}
    square_CDD = np.zeros((len(kept), dim, dim))
    for y_TD, class_T in pieces:
        for number, rows_ND in _by_class(y_TD, class_T):
            if number in place:
                square_CDD[place[number]] += rows_ND.T @ rows_ND
    return square_CDD


def _by_class(x_TS: Matrix, class_T: npt.NDArray[np.integer]) -> Iterator[tuple[int, Matrix]]:
    """Yield each class of a piece and its rows."""
    order_T = np.argsort(class_T, kind="stable")
    found, starts = np.unique(class_T[order_T], return_index=True)
    yield from zip(map(int, found), np.split(x_TS[order_T], starts[1:]), strict=True)
