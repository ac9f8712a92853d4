"""The i-vector extractor: total variability of Gaussian means along a few directions.

As in ivector-extractor.h of Kaldi, frame z of Gaussian i is N(M_i x, Sigma_i), and x is N(p e_0,
I). Covariances are full, with a floor; there are no weights that depend on x, and no rotation of
the columns. Posterior of x, with N_i = sum g, F_i = sum g z over frames:

    Q = I + sum_i N_i M_i' Sigma_i^-1 M_i,   l = p e_0 + sum_i M_i' Sigma_i^-1 F_i,
    x ~ N(Q^-1 l, Q^-1).

Letters: U utterances, I Gaussians, D features, S dimension of an i-vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PRIOR_OFFSET = 100.0  # initial value, as in Kaldi
# minimum of every covariance, relative to their weighted mean (Kaldi: 0.1)
VARIANCE_FLOOR = 0.1
# scaled count; a Gaussian with fewer keeps its mean and carries no information on x
# (gaussian-min-count in Kaldi)
FEWEST_FRAMES = 100.0
START = 0.1  # initial scale of the columns of M, in standard deviations
_UTTERANCES_AT_ONCE = 256   # bounds memory: utterances x S x S


@dataclass(frozen=True)
class Statistics:
    """Statistics of utterances with scaled posteriors; any float type, summed in float64."""

    count_UI: Tensor
    first_UID: Tensor
    second_IDD: Tensor  # of all utterances together

    @property
    def total_count(self) -> Tensor:
        """Count of each Gaussian."""
        return self.count_UI.double().sum(dim=0)


@dataclass(frozen=True)
class Extractor:
    """The model; float64."""

    M_IDS: Tensor
    covariance_IDD: Tensor
    prior_offset: float

    @property
    def dim(self) -> int:
        return self.M_IDS.shape[2]

    @cached_property
    def projection(self) -> Tensor:
        """I x D x S, Sigma^-1 M: contribution of a frame of the Gaussian to l."""
        return torch.cholesky_solve(self.M_IDS, torch.linalg.cholesky(self.covariance_IDD))

    @cached_property
    def information(self) -> Tensor:
        """I x S x S, M' Sigma^-1 M: contribution of a frame of the Gaussian to Q."""
        return self.M_IDS.mT @ self.projection

    def terms(self, count_UI: Tensor, first_UID: Tensor) -> tuple[Tensor, Tensor]:
        """Contribution of frames to (l, U x S; Q, U x S x S)."""
        linear_US = first_UID.double().flatten(1) @ self.projection.flatten(0, 1)
        quadratic_USS = (count_UI.double() @ self.information.flatten(1)).unflatten(1, (self.dim, self.dim))
        return linear_US, quadratic_USS

    def prior(self, scale_U: Tensor) -> tuple[Tensor, Tensor]:
        """Contribution of the prior, scaled by `scale_U`, to l and Q."""
        linear_US = torch.zeros(len(scale_U), self.dim, dtype=torch.float64, device=scale_U.device)
        linear_US[:, 0] = self.prior_offset * scale_U
        return linear_US, scale_U[:, None, None] * torch.eye(self.dim, dtype=torch.float64, device=scale_U.device)

    def posterior(self, count_UI: Tensor, first_UID: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, U x S; covariance, U x S x S; log-likelihood of each but for a constant)."""
        ones_U = torch.ones(len(count_UI), dtype=torch.float64, device=count_UI.device)
        parts = zip(self.terms(count_UI, first_UID), self.prior(ones_U), strict=True)
        linear_US, quadratic_USS = (frames + prior for frames, prior in parts)
        L_USS = torch.linalg.cholesky(quadratic_USS)
        mean_US = torch.cholesky_solve(linear_US[:, :, None], L_USS).squeeze(2)
        half_log_det_U = L_USS.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        log_U = 0.5 * (linear_US * mean_US).sum(dim=1) - half_log_det_U - 0.5 * self.prior_offset**2
        return mean_US, torch.cholesky_inverse(L_USS), log_U

    def log_likelihood(self, statistics: Statistics, integrals_U: Tensor) -> float:
        """Log-likelihood of all frames given their Gaussians; `integrals_U` as from `posterior`."""
        L_IDD = torch.linalg.cholesky(self.covariance_IDD)
        log_det_I = 2.0 * L_IDD.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        dim = self.M_IDS.shape[1]
        quadratic = torch.cholesky_solve(statistics.second_IDD, L_IDD).diagonal(dim1=1, dim2=2).sum()
        fixed = (statistics.total_count * (log_det_I + dim * math.log(2.0 * math.pi))).sum() + quadratic
        return float(integrals_U.sum() - 0.5 * fixed)


def start(statistics: Statistics, dim: int, *, seed: int = 0, fewest_frames: float = FEWEST_FRAMES) -> Extractor:
    """Initialize with means and covariances of the statistics, and small random directions."""
    count_I11 = statistics.total_count.clamp(min=1e-10)[:, None, None]
    mean_ID = statistics.first_UID.double().sum(dim=0) / count_I11[:, 0]
    raw_IDD = statistics.second_IDD / count_I11 - mean_ID[:, :, None] * mean_ID[:, None, :]
    covariance_IDD = floored(raw_IDD, statistics.total_count, VARIANCE_FLOOR)
    generator = torch.Generator().manual_seed(seed)
    random_IDS = torch.randn(*mean_ID.shape, dim, generator=generator, dtype=torch.float64).to(mean_ID.device)
    enough_I11 = (statistics.total_count >= fewest_frames)[:, None, None]
    M_IDS = START * random_IDS * covariance_IDD.diagonal(dim1=1, dim2=2).sqrt()[:, :, None] * enough_I11
    M_IDS[:, :, 0] = mean_ID / PRIOR_OFFSET
    return Extractor(M_IDS, covariance_IDD, PRIOR_OFFSET)


def em_pass(extractor: Extractor, statistics: Statistics, *, variance_floor: float = VARIANCE_FLOOR,
            fewest_frames: float = FEWEST_FRAMES) -> tuple[Extractor, float]:
    """Run one pass of EM; return the updated extractor and the log-likelihood per frame before it,
    which never decreases without a floor and a minimum count.
    """
    dim = extractor.dim
    Y_IDS, R_ISS = torch.zeros_like(extractor.M_IDS), torch.zeros_like(extractor.information)
    sum_S, square_SS = torch.zeros_like(R_ISS[0, 0]), torch.zeros_like(R_ISS[0])
    integrals = []
    num_utterances = len(statistics.count_UI)
    for begin in range(0, num_utterances, _UTTERANCES_AT_ONCE):
        count_UI = statistics.count_UI[begin:begin + _UTTERANCES_AT_ONCE].double()
        first_UID = statistics.first_UID[begin:begin + _UTTERANCES_AT_ONCE].double()
        mean_US, covariance_USS, log_U = extractor.posterior(count_UI, first_UID)
        expected_USS = covariance_USS + mean_US[:, :, None] * mean_US[:, None, :]
        Y_IDS += (first_UID.flatten(1).T @ mean_US).unflatten(0, first_UID.shape[1:])
        R_ISS += (count_UI.T @ expected_USS.flatten(1)).unflatten(1, (dim, dim))
        sum_S += mean_US.sum(dim=0)
        square_SS += expected_USS.sum(dim=0)
        integrals.append(log_U)
    log_likelihood = extractor.log_likelihood(statistics, torch.cat(integrals)) / float(statistics.total_count.sum())
    updated = _maximized(extractor, statistics, Y_IDS, R_ISS, variance_floor, fewest_frames)
    mean_S = sum_S / num_utterances
    return with_standard_prior(updated, mean_S, square_SS / num_utterances - mean_S[:, None] * mean_S), log_likelihood


def _maximized(extractor: Extractor, statistics: Statistics, Y_IDS: Tensor, R_ISS: Tensor, variance_floor: float,
               fewest_frames: float) -> Extractor:
    """M and Sigma of the maximum, for Gaussians with enough frames."""
    count_I = statistics.total_count
    enough = count_I >= max(fewest_frames, 1e-10)
    if not enough.any():
        return extractor
    M_IDS, covariance_IDD = extractor.M_IDS.clone(), extractor.covariance_IDD.clone()
    Y, R = Y_IDS[enough], R_ISS[enough]
    M = torch.linalg.solve(R, Y.mT).mT
    cross = M @ Y.mT
    raw = (statistics.second_IDD[enough] - cross - cross.mT + M @ R @ M.mT) / count_I[enough, None, None]
    M_IDS[enough], covariance_IDD[enough] = M, floored(0.5 * (raw + raw.mT), count_I[enough], variance_floor)
    return Extractor(M_IDS, covariance_IDD, extractor.prior_offset)


def floored(raw_IDD: Tensor, count_I: Tensor, factor: float) -> Tensor:
    """Floor the covariances at `factor` times their weighted mean; 0 leaves them unchanged."""
    if factor == 0.0:
        return raw_IDD
    mean_DD = (count_I[:, None, None] * raw_IDD).sum(dim=0) / count_I.sum()
    # a constant feature has a variance of 0
    tiny = 1e-10 * mean_DD.diagonal().max()
    L_DD = torch.linalg.cholesky(factor * mean_DD + tiny * torch.eye(len(mean_DD), dtype=mean_DD.dtype, device=mean_DD.device))
    half_IDD = torch.linalg.solve_triangular(L_DD, raw_IDD, upper=False)
    # L^-1 raw L^-T, symmetric
    relative_IDD = torch.linalg.solve_triangular(L_DD, half_IDD.mT, upper=False)
    value_ID, vector_IDD = torch.linalg.eigh(0.5 * (relative_IDD + relative_IDD.mT))
    root_IDD: Tensor = L_DD @ vector_IDD * value_ID.clamp(min=1.0).sqrt()[:, None, :]
    return root_IDD @ root_IDD.mT


def with_standard_prior(extractor: Extractor, mean_S: Tensor, covariance_SS: Tensor) -> Extractor:
    """Transform x of this mean and covariance to mean p e_0, covariance I (minimum divergence)."""
    L_SS = torch.linalg.cholesky(covariance_SS)
    mean_S = torch.linalg.solve_triangular(L_SS, mean_S[:, None], upper=False)[:, 0]
    offset = mean_S.norm()
    axis_S = mean_S / offset
    # Householder: the sign that avoids cancellation
    axis_S[0] += 1.0 if axis_S[0] >= 0.0 else -1.0
    eye_SS = torch.eye(len(mean_S), dtype=mean_S.dtype, device=mean_S.device)
    reflection_SS = eye_SS - 2.0 * axis_S[:, None] * axis_S / axis_S.square().sum()
    sign = 1.0 if (reflection_SS[0] @ mean_S) >= 0.0 else -1.0
    # A = sign H L^-1, so A^-1 = sign L H, since H is its own inverse
    return Extractor(extractor.M_IDS @ (sign * L_SS @ reflection_SS), extractor.covariance_IDD, float(offset))
