"""Mixtures of diagonal Gaussians, one per tied HMM state.

Letters: T frames, D features, P pdfs, G Gaussians of all pdfs together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ngsgd.asr.ivectors import ubm

Matrix = npt.NDArray[np.float64]

# frames for each Gaussian of a state, and the most Gaussians of one
FRAMES_PER_GAUSSIAN, MAX_GAUSSIANS = 60, 8


@dataclass(frozen=True)
class StateMixtures:
    """Gaussians of all pdfs, in the order of their pdfs.

    Attributes:
        pdf_G: pdf of each Gaussian, ascending; every pdf has one or more.
        log_weight_G: log of the weight within its pdf.
        mean_GD: means.
        variance_GD: variances.
    """

    pdf_G: npt.NDArray[np.int64]
    log_weight_G: Matrix
    mean_GD: Matrix
    variance_GD: Matrix

    @staticmethod
    def fit(x_TD: Matrix, pdf_T: npt.NDArray[np.integer], num_pdfs: int) -> StateMixtures:
        """Fit each pdf's mixture to its frames; a pdf without frames takes those of all frames."""
        order = np.argsort(pdf_T, kind="stable")
        frames_of = np.split(order, np.bincount(pdf_T, minlength=num_pdfs).cumsum()[:-1])
        parts = []
        for frames in frames_of:
            x = torch.from_numpy(np.ascontiguousarray(x_TD[frames] if len(frames) else x_TD))
            size = min(MAX_GAUSSIANS, max(1, len(frames) // FRAMES_PER_GAUSSIAN))
            parts.append(ubm.train(x, size))
        return StateMixtures(
            np.repeat(np.arange(num_pdfs), [len(part.weight_G) for part in parts]),
            np.concatenate([part.weight_G.log().numpy() for part in parts]),
            np.concatenate([part.mean_GD.numpy() for part in parts]),
            np.concatenate([part.variance_GD.numpy() for part in parts]))

    @property
    def num_pdfs(self) -> int:
        return int(self.pdf_G[-1]) + 1

    def log_joint(self, x_TD: Matrix) -> Matrix:
        """T x G: log of weight times density."""
        precision_GD = 1.0 / self.variance_GD
        constant_G = self.log_weight_G - 0.5 * (
            np.log(self.variance_GD) + self.mean_GD**2 * precision_GD + math.log(2 * math.pi)
        ).sum(axis=1)
        return np.asarray(constant_G + x_TD @ (self.mean_GD * precision_GD).T
                          - 0.5 * x_TD**2 @ precision_GD.T)

    def log_likelihood(self, x_TD: Matrix) -> npt.NDArray[np.float32]:
        """T x P: log density of each pdf."""
        starts = np.searchsorted(self.pdf_G, np.arange(self.num_pdfs))
        return np.logaddexp.reduceat(self.log_joint(x_TD), starts, axis=1).astype(np.float32)

    def precisions(self, x_TD: Matrix, pdf_T: npt.NDArray[np.integer]) -> tuple[Matrix, Matrix]:
        """Return what fMLLR sums of each frame under the mixture of its pdf.

        Returns:
            T x D: sum over Gaussians of posterior / variance, and of posterior * mean / variance.
        """
        precision_TD, linear_TD = np.empty_like(x_TD), np.empty_like(x_TD)
        for pdf in np.unique(pdf_T):
            at = np.flatnonzero(pdf_T == pdf)
            of_pdf = self.pdf_G == pdf
            own = StateMixtures(self.pdf_G[of_pdf], self.log_weight_G[of_pdf],
                                self.mean_GD[of_pdf], self.variance_GD[of_pdf])
            joint_TG = own.log_joint(x_TD[at])
            post_TG = np.exp(joint_TG - np.logaddexp.reduce(joint_TG, axis=1)[:, None])
            precision_TD[at] = post_TG @ (1.0 / own.variance_GD)
            linear_TD[at] = post_TG @ (own.mean_GD / own.variance_GD)
        return precision_TD, linear_TD
