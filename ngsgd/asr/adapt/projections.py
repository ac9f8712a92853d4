"""Linear projections of spliced features (linear discriminants, then decorrelated classes: MLLT),
and feature-space maximum likelihood linear regression (fMLLR), y = A x + b for each speaker.

Letters: T frames, S spliced features, D projected ones, E = D + 1 (and a constant 1), C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr.ivectors.model import spliced

Matrix = npt.NDArray[np.float64]
# spliced features of an utterance, and the classes of its frames
Piece = tuple[Matrix, npt.NDArray[np.integer]]

_MIN_FRAMES = 50  # classes with fewer frames have no covariance for MLLT
_MLLT_ITERS = 20  # passes of MLLT over all rows
FMLLR_ITERS = 10  # passes of fMLLR over all rows
_FMLLR_FRAMES = 2048  # bounds memory: frames x E x E


def splice(x_TD: npt.NDArray[np.floating], context: int) -> Matrix:
    """Return each frame with its neighbors on both sides; edges repeat the first and last frame."""
    return np.asarray(spliced(x_TD, np.arange(len(x_TD)), context).numpy())


def lda(within_SS: Matrix, mean_CS: Matrix, count_C: Matrix, dim: int) -> Matrix:
    """Return the directions that separate classes best (D x S), of unit within-class covariance.

    `mean_CS` are the means of the classes minus that of all frames. Haeb-Umbach and Ney, "Linear
    discriminant analysis for improved ... speech recognition" (1992).
    """
    centered_CS = mean_CS * np.sqrt(count_C / count_C.sum())[:, None]
    whitening_SS = np.linalg.inv(np.linalg.cholesky(within_SS))
    centered_CS = centered_CS @ whitening_SS.T
    _, axes_SS = np.linalg.eigh(centered_CS.T @ centered_CS)
    return np.asarray(axes_SS[:, ::-1][:, :dim].T @ whitening_SS)


def mllt(covariance_CDD: Matrix, count_C: Matrix) -> Matrix:
    """Return the D x D transform under which classes have the most nearly diagonal covariances.

    Rows are updated in turn. Gales, "Semi-tied covariance matrices for hidden Markov models"
    (1999).
    """
    transform_DD = np.eye(covariance_CDD.shape[1])
    for _ in range(_MLLT_ITERS):
        variance_CD = np.einsum("da,cab,db->cd", transform_DD, covariance_CDD, transform_DD, optimize=True)
        for row in range(len(transform_DD)):
            moment_DD = np.tensordot(count_C / variance_CD[:, row], covariance_CDD, axes=1)
            cofactors_D = np.linalg.inv(transform_DD)[:, row]
            direction_D = np.linalg.solve(moment_DD, cofactors_D)
            transform_DD[row] = np.sqrt(count_C.sum() / (cofactors_D @ direction_D)) * direction_D
    return transform_DD


def projection(pieces: Callable[[], Iterable[Piece]], num_classes: int, dim: int) -> tuple[Matrix, Matrix]:
    """Estimate LDA and MLLT (D x S, unit variance) and the mean; `pieces` is called twice."""
    count_C = np.zeros(num_classes)
    sum_CS, square_SS = np.zeros((num_classes, 0)), np.zeros((0, 0))
    for x_TS, class_T in pieces():
        if not sum_CS.size:
            sum_CS, square_SS = np.zeros((num_classes, x_TS.shape[1])), np.zeros((x_TS.shape[1],) * 2)
        square_SS += x_TS.T @ x_TS
        for number, rows_NS in _by_class(x_TS, class_T):
            count_C[number] += len(rows_NS)
            sum_CS[number] += rows_NS.sum(axis=0)
    mean_S = sum_CS.sum(axis=0) / count_C.sum()
    # minus the mean of all frames
    mean_CS = np.where(count_C[:, None] > 0, sum_CS / np.maximum(count_C, 1.0)[:, None] - mean_S, 0.0)
    total_SS = square_SS / count_C.sum() - np.outer(mean_S, mean_S)
    weighted_CS = mean_CS * np.sqrt(count_C / count_C.sum())[:, None]
    lda_DS = lda(total_SS - weighted_CS.T @ weighted_CS, mean_CS, count_C, dim)
    # classes with enough frames for a covariance, or the largest one
    kept = np.flatnonzero(count_C >= min(_MIN_FRAMES, count_C.max()))
    place = {int(number): at for at, number in enumerate(kept)}
    square_CDD = np.zeros((len(kept), dim, dim))
    for x_TS, class_T in pieces():
        for number, rows_ND in _by_class((x_TS - mean_S) @ lda_DS.T, class_T):
            if number in place:
                square_CDD[place[number]] += rows_ND.T @ rows_ND
    mean_CD = mean_CS[kept] @ lda_DS.T
    covariance_CDD = square_CDD / count_C[kept, None, None] - mean_CD[:, :, None] * mean_CD[:, None]
    matrix_DS = mllt(covariance_CDD, count_C[kept]) @ lda_DS
    variance_D = np.einsum("ds,st,dt->d", matrix_DS, total_SS, matrix_DS, optimize=True)
    return matrix_DS / np.sqrt(variance_D)[:, None], mean_S


def _by_class(x_TS: Matrix, class_T: npt.NDArray[np.integer]) -> Iterator[tuple[int, Matrix]]:
    order_T = np.argsort(class_T, kind="stable")
    found, starts = np.unique(class_T[order_T], return_index=True)
    yield from zip(map(int, found), np.split(x_TS[order_T], starts[1:]), strict=True)


@dataclass
class FmllrStats:
    """Sums of one speaker, of which W = [A b] maximizes the likelihood (Gales 1998), row by row."""

    count: float  # frames
    linear_DE: Matrix  # sum of mean / variance times [x 1]
    square_DEE: Matrix  # sum of 1 / variance times [x 1][x 1]^T

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
        """Add frames, and their sums of posterior / variance and posterior * mean / variance."""
        self.count += len(x_TD)
        for start in range(0, len(x_TD), _FMLLR_FRAMES):
            part = slice(start, start + _FMLLR_FRAMES)
            x_TE = np.concatenate([x_TD[part], np.ones((len(x_TD[part]), 1))], axis=1)
            outer = np.einsum("ta,tb->tab", x_TE, x_TE).reshape(len(x_TE), -1)
            self.linear_DE += mean_TD[part].T @ x_TE
            self.square_DEE += (precision_TD[part].T @ outer).reshape(self.square_DEE.shape)

    def estimate(self) -> Matrix:
        """Return W = [A b] (D x E), starting from the identity, from sums of more than D frames."""
        w_DE = np.eye(*self.linear_DE.shape)
        inverse_DEE = np.linalg.inv(self.square_DEE)
        for _ in range(FMLLR_ITERS):
            for row, inverse_EE in enumerate(inverse_DEE):
                cofactors_E = np.append(np.linalg.inv(w_DE[:, :-1])[:, row], 0.0)
                # the root of a quadratic with the larger likelihood
                a = float(cofactors_E @ inverse_EE @ cofactors_E)
                b = float(cofactors_E @ inverse_EE @ self.linear_DE[row])
                root = np.sqrt(b * b + 4.0 * a * self.count)
                likelihood = {c: self.count * np.log(abs(c * a + b)) - 0.5 * c * c * a
                              for c in ((-b + root) / (2.0 * a), (-b - root) / (2.0 * a))}
                best = max(likelihood, key=likelihood.__getitem__)
                w_DE[row] = (best * cofactors_E + self.linear_DE[row]) @ inverse_EE
        return w_DE


def apply(w_DE: Matrix, x_TD: Matrix) -> Matrix:
    """Return A x + b of each frame."""
    return np.asarray(x_TD @ w_DE[:, :-1].T + w_DE[:, -1])
