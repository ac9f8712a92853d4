"""LDA and MLLT of large corpora, from sums over utterances that are read in two passes.

The result is that of `ngsgd.asr.adapt.projections` up to rounding.

Letters: T frames, S spliced features, D projected features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr.adapt import projections

Matrix = npt.NDArray[np.float64]
# spliced features of an utterance, and the classes of its frames
Piece = tuple[Matrix, npt.NDArray[np.integer]]

# about three hours; the spliced features of smaller corpora are in memory at once
FRAMES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class _Moments:
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
    lda_DS = projections.lda_of_moments(moments.within, moments.mean_CS, moments.count_C, dim)
    kept = projections.frequent(moments.count_C)
    centered = ((x_TS - moments.mean_S, class_T) for x_TS, class_T in pieces())
    square_CDD = _squares(((x_TS @ lda_DS.T, class_T) for x_TS, class_T in centered), kept, dim)
    mean_CD = moments.mean_CS[kept] @ lda_DS.T
    covariance_CDD = square_CDD / moments.count_C[kept, None, None] - mean_CD[:, :, None] * mean_CD[:, None]
    matrix_DS = projections.mllt_of_covariances(covariance_CDD, moments.count_C[kept]) @ lda_DS
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
