"""Mixtures of diagonal Gaussians, one per HMM state, and the features that they describe.

A network can learn wrong labels and then confirm them. Mixtures describe what most frames of a
state share, and grow while the labels improve. Letters: T frames, D features, K features with time
differences, P pdfs (states), S some of them, G Gaussians of all pdfs together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr.features import cmvn
from ngsgd.data import mapped
from ngsgd.errors import DataError
from ngsgd.phase import Each

Matrix = npt.NDArray[np.float64]
Scores = npt.NDArray[np.float32]
Pdfs = npt.NDArray[np.integer]
Rows = npt.NDArray[np.floating]  # T x D
Piece = tuple[Rows, Pdfs]  # frames and their states

NUM_CEPSTRA = 13  # usual number
VARIANCE_FLOOR = 0.01  # minimum variance of a Gaussian, relative to that of all frames
# a pdf with fewer frames gets the mean and variance of all; a Gaussian with fewer is removed
FEWEST_FRAMES = 10
# of a matrix product; more frames, about three hours, are added up
FRAMES_AT_ONCE = 1 << 20
# passes of EM, and the first of them, in which mixtures grow
NUM_EM_PASSES, _NUM_GROWING_PASSES = 30, 24
# bounds memory: rows of features, and rows of posteriors of all Gaussians of a pdf
_FRAMES_OF_PIECE, _FRAMES_OF_BLOCK = 1 << 18, 1 << 13
# the Gaussians of a pdf are in proportion to this power of its frames, as in Kaldi
_POWER = 0.25
_FRAMES_PER_GAUSSIAN = 20  # at least
# distance of the halves of a Gaussian from its mean, in standard deviations
_PERTURBATION = 0.1
# mean correlation of neighboring features of a filterbank, at least
_LEAST_ALIKE = 0.5
# regression over two frames on either side, as in add-deltas of Kaldi
_DELTAS = np.array([-2, -1, 0, 1, 2]) / 10.0


@dataclass(frozen=True)
class Axes:
    """Cepstra of unit variance: of filterbanks by a cosine transform, of cepstra as they are.

    Principal axes separate phones worse: 74 %WER instead of 64 with monophones of speechocean762.
    """

    mean_D: Matrix
    rotation_DK: Matrix

    @classmethod
    def of(cls, features_TD: npt.NDArray[np.float32]) -> Axes:
        """Compute up to `NUM_CEPSTRA` axes; DataError if no feature varies."""
        mean_D = np.zeros(features_TD.shape[1])
        for block_TD in mapped.blocks(features_TD):
            mean_D = cmvn.added(mean_D, block_TD)
        mean_D /= len(features_TD)
        scatter_DD = np.zeros((len(mean_D), len(mean_D)))
        for begin in range(0, len(features_TD), FRAMES_AT_ONCE):
            centered_TD = features_TD[begin:begin + FRAMES_AT_ONCE] - mean_D
            scatter_DD += centered_TD.T @ centered_TD
            mapped.release(features_TD)
        variance_D = scatter_DD.diagonal() / len(features_TD)
        if not (variance_D > 0.0).any():
            raise DataError(f"no feature of the {len(features_TD)} frames varies: all training audio is "
                            "silent; check the recordings.")
        deviation_D = np.sqrt(np.maximum(scatter_DD.diagonal(), 1e-30))
        # neighboring bands of a filterbank are alike
        alike_D = scatter_DD.diagonal(offset=1) / (deviation_D[1:] * deviation_D[:-1])
        rotation_DK = np.eye(len(mean_D))
        if len(alike_D) and alike_D.mean() > _LEAST_ALIKE:
            band_D = np.pi / len(mean_D) * (np.arange(len(mean_D)) + 0.5)
            rotation_DK = np.cos(np.outer(band_D, np.arange(len(mean_D))))
        rotation_DK = rotation_DK[:, :NUM_CEPSTRA]
        variance_K = np.einsum("dk,de,ek->k", rotation_DK, scatter_DD, rotation_DK) / len(features_TD)
        # a constant feature has no direction
        varies_K = variance_K > 1e-9 * variance_D.max()
        return cls(mean_D, rotation_DK[:, varies_K] / np.sqrt(variance_K[varies_K]))

    def apply(self, features_TD: npt.NDArray[np.float32]) -> Scores:
        """Return T x K cepstra of one utterance with first and second differences."""
        rotated_TK = (features_TD - self.mean_D) @ self.rotation_DK
        first = time_differences(rotated_TK)
        return np.concatenate([rotated_TK, first, time_differences(first)], axis=1, dtype=np.float32)


@dataclass(frozen=True)
class StateMixtures:
    """Mixtures of diagonal Gaussians, one per HMM state, in the order of their pdfs."""

    pdf_G: npt.NDArray[np.int64]  # ascending; every pdf has one or more
    log_weight_G: Matrix  # of the weight within its pdf
    mean_GD: Matrix
    variance_GD: Matrix

    @classmethod
    def single(cls, pieces: Callable[[], Iterable[Piece]], num_pdfs: int) -> tuple[StateMixtures, Matrix]:
        """Fit one Gaussian to each pdf; return them and the minimum of the variances.

        `pieces` is called twice. A pdf with few frames has the Gaussian of all frames.
        """
        zero_GD = np.zeros((1, next(iter(pieces()))[0].shape[1]))
        every, _ = cls(np.zeros(1, np.int64), np.zeros(1), zero_GD, zero_GD + 1.0).reestimated(
            ((x_TD, np.zeros_like(pdf_T)) for x_TD, pdf_T in pieces()), zero_GD[0])
        floor_D = VARIANCE_FLOOR * every.variance_GD[0]
        mean_PD, variance_PD = every.mean_GD.repeat(num_pdfs, axis=0), every.variance_GD.repeat(num_pdfs, axis=0)
        return cls(np.arange(num_pdfs), np.zeros(num_pdfs), mean_PD, variance_PD).reestimated(pieces(), floor_D)[0], floor_D

    @property
    def num_pdfs(self) -> int:
        return int(self.pdf_G[-1]) + 1

    @functools.cached_property
    def begins(self) -> npt.NDArray[np.int64]:
        """The first Gaussian of each of the P pdfs, and the number of all."""
        return np.searchsorted(self.pdf_G, np.arange(self.num_pdfs + 1))

    @functools.cached_property
    def _linear(self) -> tuple[Matrix, Matrix]:
        """Constants (G) and weights of [x x^2] (G x 2D) of the log joint density."""
        precision_GD = 1.0 / self.variance_GD
        log_GD = np.log(self.variance_GD) + self.mean_GD**2 * precision_GD + math.log(2 * math.pi)
        weight_GE = np.concatenate([self.mean_GD * precision_GD, -0.5 * precision_GD], axis=1)
        return self.log_weight_G - 0.5 * log_GD.sum(axis=1), weight_GE

    def log_joint(self, x_TD: Rows, which: slice | Pdfs = slice(None)) -> Matrix:
        """T x G: log of weight times density, of some Gaussians."""
        constant_G, weight_GE = self._linear
        joint_TG = np.concatenate([x_TD, x_TD**2], axis=1) @ weight_GE[which].T.astype(x_TD.dtype)
        joint_TG += constant_G[which]
        return np.asarray(joint_TG)

    def log_likelihood(self, x_TD: Rows, pdfs: Pdfs | None = None) -> Scores:
        """Return the log density of each pdf (T x P), or of `pdfs` (T x S)."""
        pdf_S = np.arange(self.num_pdfs) if pdfs is None else pdfs
        size_S = np.diff(self.begins)[pdf_S]
        first_S = np.cumsum(size_S) - size_S
        joint_TG = self.log_joint(x_TD, np.arange(size_S.sum()) + np.repeat(self.begins[pdf_S] - first_S, size_S))
        most_TS = np.maximum.reduceat(joint_TG, first_S, axis=1)
        joint_TG -= np.repeat(most_TS, size_S, axis=1)
        np.exp(joint_TG, out=joint_TG)
        return (np.log(np.add.reduceat(joint_TG, first_S, axis=1)) + most_TS).astype(np.float32)

    def posteriors(self, x_TD: Rows, pdf_T: Pdfs) -> Iterator[tuple[Pdfs, slice, Matrix]]:
        """Yield some frames of each pdf, its Gaussians, and their posteriors."""
        order_T = np.argsort(pdf_T, kind="stable")
        found, starts = np.unique(pdf_T[order_T], return_index=True)
        for pdf, frames in zip(found.tolist(), np.split(order_T, starts[1:]), strict=True):
            some = slice(*self.begins[pdf:pdf + 2])
            for begin in range(0, len(frames), _FRAMES_OF_BLOCK):
                block = frames[begin:begin + _FRAMES_OF_BLOCK]
                joint_TG = self.log_joint(x_TD[block], some)
                joint_TG -= joint_TG.max(axis=1, keepdims=True)
                np.exp(joint_TG, out=joint_TG)
                joint_TG /= joint_TG.sum(axis=1, keepdims=True)
                yield block, some, joint_TG

    def precisions(self, x_TD: Rows, pdf_T: Pdfs) -> tuple[Matrix, Matrix]:
        """T x D: sums over the Gaussians of the pdf of posterior / variance, and times the mean."""
        precision_TD, linear_TD = np.empty((2, *x_TD.shape))
        for frames, some, post_TG in self.posteriors(x_TD, pdf_T):
            precision_TD[frames] = post_TG @ (1.0 / self.variance_GD[some])
            linear_TD[frames] = post_TG @ (self.mean_GD[some] / self.variance_GD[some])
        return precision_TD, linear_TD

    def reestimated(self, pieces: Iterable[Piece], floor_D: Matrix) -> tuple[StateMixtures, Matrix]:
        """Return the mixtures after a pass of EM with fixed states, and the frames of each pdf.

        Gaussians with few frames are removed, but the heaviest of each pdf.
        """
        count_G, sums_GE = np.zeros(len(self.pdf_G)), np.zeros((len(self.pdf_G), 2 * len(floor_D)))
        for x_TD, pdf_T in pieces:
            for frames, some, post_TG in self.posteriors(x_TD, pdf_T):
                post_GT, rows_TD = post_TG.T.astype(np.float64), x_TD[frames].astype(np.float64)
                count_G[some] += post_GT.sum(axis=1)
                sums_GE[some] += np.concatenate([post_GT @ rows_TD, post_GT @ rows_TD**2], axis=1)
        count_P = np.add.reduceat(count_G, self.begins[:-1])
        is_rare_G = count_G < FEWEST_FRAMES
        heaviest_P = np.lexsort((-count_G, self.pdf_G))[self.begins[:-1]]
        is_kept_G = ~is_rare_G
        is_kept_G[heaviest_P] = True
        mean_GD, square_GD = np.split(sums_GE / np.maximum(count_G, FEWEST_FRAMES)[:, None], 2, axis=1)
        variance_GD = np.maximum(square_GD - mean_GD**2, floor_D)
        count_G = np.where(is_kept_G, np.maximum(count_G, 1e-9), 0.0)
        weight_G = count_G / np.add.reduceat(count_G, self.begins[:-1])[self.pdf_G]
        return StateMixtures(self.pdf_G[is_kept_G], np.log(weight_G[is_kept_G]),
                             np.where(is_rare_G[:, None], self.mean_GD, mean_GD)[is_kept_G],
                             np.where(is_rare_G[:, None], self.variance_GD, variance_GD)[is_kept_G]), count_P

    def split(self, count_P: Matrix, num_gaussians: float, random: np.random.Generator) -> StateMixtures:
        """Split the heaviest Gaussians of each pdf until there are about `num_gaussians`."""
        share_P = count_P**_POWER
        size_P = np.minimum(np.round(share_P / share_P.sum() * num_gaussians), count_P // _FRAMES_PER_GAUSSIAN)
        found = self
        while len(small := np.flatnonzero(np.diff(found.begins) < size_P)):
            half_G = np.lexsort((-found.log_weight_G, found.pdf_G))[found.begins[small]]
            apart_GD = _PERTURBATION * np.sqrt(found.variance_GD[half_G])
            apart_GD *= random.standard_normal(apart_GD.shape)
            log_weight_G, mean_GD = found.log_weight_G.copy(), found.mean_GD.copy()
            log_weight_G[half_G] -= math.log(2.0)
            mean_GD[half_G] += apart_GD
            every_G = np.append(np.arange(len(found.pdf_G)), half_G)
            order_G = np.argsort(found.pdf_G[every_G], kind="stable")
            mean_GD = np.concatenate([mean_GD, mean_GD[half_G] - 2.0 * apart_GD])[order_G]
            every_G = every_G[order_G]
            found = StateMixtures(found.pdf_G[every_G], log_weight_G[every_G], mean_GD, found.variance_GD[every_G])
        return found


def train(pieces: Callable[[], Iterable[Piece]], num_pdfs: int, *, num_gaussians: int,
          realign: Callable[[int, StateMixtures], None] = lambda _number, _mixtures: None, each: Each = iter) -> StateMixtures:
    """Train mixtures from one Gaussian per pdf to `num_gaussians`, as Kaldi's `train_mono.sh`.

    `pieces` returns all frames and their states, which `realign` may change before each of the
    passes, numbered from 1.
    """
    random = np.random.default_rng(0)
    mixtures, floor_D = StateMixtures.single(pieces, num_pdfs)
    for number in each(range(1, NUM_EM_PASSES + 1)):
        realign(number, mixtures)
        mixtures, count_P = mixtures.reestimated(pieces(), floor_D)
        if number <= _NUM_GROWING_PASSES:
            share = number / _NUM_GROWING_PASSES
            mixtures = mixtures.split(count_P, (1.0 - share) * num_pdfs + share * num_gaussians, random)
    return mixtures


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join pieces to larger ones, which take less time for each pdf."""
    num_frames = 0

    def number(piece: Piece) -> int:
        nonlocal num_frames
        num_frames += len(piece[1])
        return num_frames // _FRAMES_OF_PIECE
    for _, some in itertools.groupby(pieces, number):
        x_TD, pdf_T = zip(*some, strict=True)
        yield np.concatenate(x_TD), np.concatenate(pdf_T)


def time_differences(x_TK: Matrix) -> Matrix:
    """Slope of the regression line around every frame; the edge frames are repeated."""
    padded = np.pad(x_TK, ((2, 2), (0, 0)), mode="edge")
    return np.asarray(sum(weight * padded[i:i + len(x_TK)] for i, weight in enumerate(_DELTAS)))


def sums_by_state(x_TK: Rows, pdf_T: npt.NDArray[np.integer], num_pdfs: int) -> Matrix:
    return np.stack([np.bincount(pdf_T, weights=column, minlength=num_pdfs) for column in x_TK.T], axis=1)
