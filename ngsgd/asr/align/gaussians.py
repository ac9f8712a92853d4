"""One Gaussian with a diagonal covariance per HMM state, for re-alignment after a flat start.

A network can learn wrong labels and then confirm them. A Gaussian describes what most of its frames
share. Features are decorrelated first (principal axes), and time differences are appended.
Letters: T frames, D features, K decorrelated features with differences, P pdfs, S some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr.features import cmvn
from ngsgd.data import mapped
from ngsgd.errors import DataError

Matrix = npt.NDArray[np.float64]
Piece = tuple[Matrix, npt.NDArray[np.int32]]  # frames and their states

MOST_AXES = 13  # usual number of cepstra
VARIANCE_FLOOR = 0.05  # minimum variance of a state, relative to that of all frames
# a state with fewer frames gets the mean and variance of all frames
FEWEST_FRAMES = 5
# of a matrix product; more frames, about three hours, are added up
FRAMES_AT_ONCE = 1 << 20
# regression over two frames on either side, as in add-deltas of Kaldi
_DELTAS = np.array([-2, -1, 0, 1, 2]) / 10.0


@dataclass(frozen=True)
class Axes:
    """Rotation that decorrelates features and scales them to unit variance."""

    mean_D: Matrix
    rotation_DK: Matrix

    @classmethod
    def of(cls, features_TD: npt.NDArray[np.float32]) -> Axes:
        """Compute up to `MOST_AXES` axes of largest variance; DataError if no feature varies."""
        mean_D = np.zeros(features_TD.shape[1])
        for block_TD in mapped.blocks(features_TD):
            mean_D = cmvn.added(mean_D, block_TD)
        mean_D /= len(features_TD)
        scatter_DD = np.zeros((len(mean_D), len(mean_D)))
        for begin in range(0, len(features_TD), FRAMES_AT_ONCE):
            centered_TD = features_TD[begin:begin + FRAMES_AT_ONCE] - mean_D
            scatter_DD += centered_TD.T @ centered_TD
            mapped.release(features_TD)
        variance_D, axes_DD = np.linalg.eigh(scatter_DD / len(features_TD))
        order = np.argsort(-variance_D)[:MOST_AXES]
        # a constant feature has no direction
        order = order[variance_D[order] > 1e-9 * variance_D.max()]
        if not len(order):
            raise DataError(f"no feature of the {len(features_TD)} frames varies: all training audio is "
                            "silent; check the recordings.")
        return cls(mean_D, axes_DD[:, order] / np.sqrt(variance_D[order]))

    def apply(self, features_TD: npt.NDArray[np.float32]) -> Matrix:
        """Return T x K rotated features of one utterance with first and second differences."""
        rotated_TK = (features_TD - self.mean_D) @ self.rotation_DK
        first = time_differences(rotated_TK)
        return np.concatenate([rotated_TK, first, time_differences(first)], axis=1)


@dataclass(frozen=True)
class Gaussians:
    """Means and variances of the states."""

    mean_PK: Matrix
    variance_PK: Matrix

    @classmethod
    def fit(cls, pieces: Callable[[], Iterable[Piece]], num_pdfs: int) -> Gaussians:
        """Estimate by maximum likelihood with a variance floor. `pieces` returns all frames and
        their states, and is called twice; the result is bitwise that of one piece.
        """
        count_P = np.zeros(num_pdfs)
        all_K, sum_PK, square_PK = np.zeros(0), np.zeros((num_pdfs, 0)), np.zeros((num_pdfs, 0))
        for x_TK, pdf_T in pieces():
            if not all_K.size:
                all_K = np.zeros(x_TK.shape[1])
                sum_PK, square_PK = np.zeros((2, num_pdfs, x_TK.shape[1]))
            count_P += np.bincount(pdf_T, minlength=num_pdfs)
            # the sums so far are the first frames
            pdf_N = np.concatenate([np.arange(num_pdfs), pdf_T])
            all_K = cmvn.added(all_K, x_TK)
            sum_PK = sums_by_state(np.concatenate([sum_PK, x_TK]), pdf_N, num_pdfs)
            square_PK = sums_by_state(np.concatenate([square_PK, x_TK**2]), pdf_N, num_pdfs)
        num_frames = count_P.sum()
        all_mean_K, all_square_K = all_K / num_frames, np.zeros_like(all_K)
        for x_TK, _ in pieces():
            all_square_K = cmvn.added(all_square_K, np.square(x_TK - all_mean_K))
        all_variance_K = all_square_K / num_frames
        safe_P1 = np.maximum(count_P, 1.0)[:, None]
        mean_PK, square_PK = sum_PK / safe_P1, square_PK / safe_P1
        variance_PK = np.maximum(square_PK - mean_PK**2, VARIANCE_FLOOR * all_variance_K)
        rare_P1 = (count_P < FEWEST_FRAMES)[:, None]
        return cls(np.where(rare_P1, all_mean_K, mean_PK), np.where(rare_P1, all_variance_K, variance_PK))

    def log_likelihood(self, x_TK: Matrix, pdfs: Sequence[int] | None = None) -> npt.NDArray[np.float32]:
        """Return T x P log densities; with `pdfs` those of other states are 0."""
        some = slice(None) if pdfs is None else list(pdfs)
        mean_SK, variance_SK = self.mean_PK[some], self.variance_PK[some]
        precision_SK = 1 / variance_SK
        constant_S = -0.5 * (np.log(variance_SK) + mean_SK**2 * precision_SK + math.log(2 * math.pi)).sum(axis=1)
        quadratic_TS = -0.5 * x_TK**2 @ precision_SK.T + x_TK @ (mean_SK * precision_SK).T
        loglik_TP = np.zeros((len(x_TK), len(self.mean_PK)), np.float32)
        loglik_TP[:, some] = quadratic_TS + constant_S
        return loglik_TP


def time_differences(x_TK: Matrix) -> Matrix:
    """Slope of the regression line around every frame; the edge frames are repeated."""
    padded = np.pad(x_TK, ((2, 2), (0, 0)), mode="edge")
    return np.asarray(sum(weight * padded[i:i + len(x_TK)] for i, weight in enumerate(_DELTAS)))


def sums_by_state(x_TK: Matrix, pdf_T: npt.NDArray[np.integer], num_pdfs: int) -> Matrix:
    return np.stack([np.bincount(pdf_T, weights=column, minlength=num_pdfs) for column in x_TK.T], axis=1)
