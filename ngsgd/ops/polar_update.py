"""Online natural gradient without eigenvalues: an update by matrix products alone.

Kaldi's update decomposes an R x R matrix into eigenvectors, for which a device waits for the host.
The basis of R is free, so that the symmetric square root serves as well:

    F_t = R_t^T M_t R_t + rho_t I                             M symmetric, not diagonal
    Y = (eta/N) R_t X^T X + (1 - eta) (M_t + rho_t I) R_t     = R_t T_t
    S = (Y Y^T)^(1/2),  R' = S^-1 Y,  M' = S - rho' I

R' differs from Kaldi's by a rotation, and F' is the same. S and S^-1 come from a Newton-Schulz
iteration in float64. The floors of rho are traces and norms. Kaldi's floor of each single
eigenvalue (60) does not exist here. Rows are preconditioned as X - (X R^T) (E R) with

    beta = rho (1 + alpha) + alpha/D tr M  (35),  E = M (beta I + M)^-1 = I - beta (beta I + M)^-1  (43)

Letters as in `ngsgd.ops.natural_gradient`; L estimates, padded with zeros to R x R matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.device import triton_kernels
from ngsgd.ops.natural_gradient import SMALLEST_EIGENVALUE, FisherState, Smoothing, spectrum

# Smallest singular value of Y relative to its norm for which R' is orthonormal. Rows of R that are
# smaller are too short; one with an eigenvalue at its floor grows to length 1 in later updates.
_SMALLEST_RATIO = 2.5e-5
# relative error before the last step, which squares it
_PRECISION = 3e-6


class PolarState(NamedTuple):
    """The low-rank Fisher estimate F_t; all on one device."""

    # orthonormal rows, in the dtype of the rows of X
    R_RD: Tensor
    # E R
    V_RD: Tensor
    # float64, as is rho
    M_RR: Tensor
    rho: Tensor

    @property
    def left_RD(self) -> Tensor:  # noqa: N802
        """Rows are X - (X left^T) right."""
        return self.R_RD

    @property
    def right_RD(self) -> Tensor:  # noqa: N802
        """See `left_RD`."""
        return self.V_RD


class Constants(NamedTuple):
    """Constants of L estimates."""

    # float64 on their device: D, D - R, 1 + alpha, alpha / D, epsilon, delta
    numbers_6L: Tensor
    # least eigenvalue of beta I + M relative to their largest
    least: float

    @classmethod
    def of(cls, dims: Sequence[int], ranks: Sequence[int], smoothings: Sequence[Smoothing], device: torch.device) -> Constants:
        """Collect those of some estimates."""
        alphas = [one.alpha for one in smoothings]
        numbers_6L = torch.tensor(
            [dims, [dim - rank for dim, rank in zip(dims, ranks, strict=True)], [1.0 + alpha for alpha in alphas],
             [alpha / dim for alpha, dim in zip(alphas, dims, strict=True)],
             [SMALLEST_EIGENVALUE if one.is_relative else one.epsilon for one in smoothings],
             [one.delta for one in smoothings]], dtype=torch.float64)
        least = min(max(one.alpha / (dim + one.alpha), one.delta) for dim, one in zip(dims, smoothings, strict=True)) / 4
        return cls(numbers_6L.to(device), least)


class Spectrum(NamedTuple):
    """M and rho of L estimates, float64."""

    M_LRR: Tensor
    rho_L: Tensor


def polar(state: FisherState, smoothing: Smoothing) -> PolarState:
    """Return the same estimate in this form."""
    W_RD = state.W_RD
    e_R = torch.from_numpy(spectrum(state, smoothing).copy())
    root_R1 = e_R.sqrt()[:, None].to(W_RD)
    M_RR = torch.from_numpy(state.d_R.copy()).diag().to(W_RD.device)
    rho = torch.full((), state.rho, dtype=torch.float64, device=W_RD.device)
    return PolarState(W_RD / root_R1, W_RD * root_R1, M_RR, rho)


def kaldi(state: PolarState, smoothing: Smoothing) -> FisherState:
    """Return the same estimate in Kaldi's form, by one eigendecomposition on the host."""
    d_R, U_RR = torch.linalg.eigh(state.M_RR.cpu())
    d_R, U_RR = d_R.flip(0).clamp(min=SMALLEST_EIGENVALUE), U_RR.flip(1)
    rho = float(state.rho)
    R_RD = U_RR.T.to(state.R_RD) @ state.R_RD
    found = FisherState(R_RD, d_R.numpy().copy(), rho)
    e_R = torch.from_numpy(spectrum(found, smoothing).copy())
    return found._replace(W_RD=e_R.sqrt()[:, None].to(R_RD) * R_RD)


def kept(spectrum: Spectrum, keep_L: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keep (M + rho I), the factor of R in Y, in the dtype of R."""
    found_LRR = torch.empty_like(spectrum.M_LRR, dtype=dtype)
    torch.ops.ngsgd.polar_kept(*spectrum, keep_L, found_LRR)
    return found_LRR


def next_spectrum(Z_LRR: Tensor, spectrum: Spectrum, sum_sq_L: Tensor, shares_4L: Tensor,
                  constants: Constants) -> tuple[Tensor, Tensor]:
    """Change M and rho in place if the minibatch is finite.

    Args:
        Z_LRR: Y Y^T (N / eta)^2, float64; overwritten.
        spectrum, constants: of F_t.
        sum_sq_L: tr X X^T.
        shares_4L: eta / N, 1 - eta, (1 - eta) N / eta and (eta / N)^2.

    Returns (S^-1, the factor of Y in R', and whether the minibatch was finite).
    """
    P_LRR, S_LRR = roots(Z_LRR, shares_4L[3])
    is_finite_L = torch.empty_like(sum_sq_L, dtype=torch.bool)
    torch.ops.ngsgd.polar_spectrum(S_LRR, torch.bmm(Z_LRR, Z_LRR), sum_sq_L, shares_4L, constants.numbers_6L, *spectrum,
                                   is_finite_L)
    return P_LRR, is_finite_L


def removed(spectrum: Spectrum, constants: Constants) -> Tensor:
    """Return E (43): its eigenvalues are 0 in a direction that stays, 1 in one that is removed."""
    M_LRR = spectrum.M_LRR
    L, R, _ = M_LRR.shape
    # P and A = P B, one above the other: one product for both
    PA_LRR, B_LRR, ratio_L = M_LRR.new_empty(L, 2 * R, R), torch.empty_like(M_LRR), torch.empty_like(spectrum.rho_L)
    torch.ops.ngsgd.polar_inverse_start(M_LRR, torch.bmm(M_LRR, M_LRR), spectrum.rho_L, constants.numbers_6L, PA_LRR, B_LRR,
                                        ratio_L)
    for a, b in _inverse_steps(constants.least):
        PA_LRR = torch.baddbmm(PA_LRR, PA_LRR, PA_LRR[:, R:], beta=a, alpha=-b)
    P_LRR = PA_LRR[:, :R]
    # A step from B itself, because the first steps have multiplied rounding errors of A.
    p_LRR = torch.baddbmm(_eye(R, M_LRR.device, 2.0), B_LRR, P_LRR, alpha=-1)
    return torch.baddbmm(_eye(R, M_LRR.device), P_LRR * ratio_L[:, None, None], p_LRR, alpha=-1)


def roots(Z_LRR: Tensor, factor_L: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply Z, positive semidefinite, by a factor; return (Z^-1/2, Z^1/2), NaN for Z = 0."""
    # Eigenvalues below 6e-10 |Z| have too small inverse roots.
    L, R, _ = Z_LRR.shape
    # P is the second of three matrices. A is the third, then the first, and so on: one product P p,
    # A p serves both neighbors. p A p needs other memory than A p.
    memory, inverse_root_L = Z_LRR.new_empty(2, L, 3, R, R), torch.empty_like(factor_L)
    now, after = memory
    torch.ops.ngsgd.polar_roots_start(Z_LRR, factor_L, now, inverse_root_L)
    place = 2
    steps = _root_steps(_SMALLEST_RATIO)
    for number, (a, b) in enumerate(steps, start=1):
        # p = a I + b A commutes with A and P.
        A_LRR, half_LRR = now[:, place], after[:, place]
        both, both_next = (one[:, place // 2:place // 2 + 2].view(L, 2 * R, R) for one in (now, after))
        torch.baddbmm(both, both, A_LRR, beta=a, alpha=b, out=both_next)
        place = 2 - place
        if number < len(steps):
            torch.baddbmm(half_LRR, half_LRR, A_LRR, beta=a, alpha=b, out=after[:, place])
        now, after = after, now
    # A step from Z itself, because the first steps have multiplied rounding errors of A.
    P_LRR, S_LRR = torch.mul(now[:, 1], inverse_root_L[:, None, None], out=after[:, 1]), after[:, 2]
    torch.bmm(Z_LRR, P_LRR, out=S_LRR)
    p_LRR = torch.baddbmm(_eye(R, Z_LRR.device, 1.5), P_LRR, S_LRR, alpha=-0.5)
    P_LRR, S_LRR = torch.bmm(after[:, 1:].view(L, 2 * R, R), p_LRR).split(R, dim=1)
    return P_LRR, S_LRR


def polar_kept(M_LRR: Tensor, rho_L: Tensor, keep_L: Tensor, found_LRR: Tensor) -> None:
    """See `kept`."""
    sum_LRR = torch.addcmul(M_LRR, _eye(M_LRR.shape[1], M_LRR.device), rho_L[:, None, None])
    torch.mul(sum_LRR, keep_L[:, None, None], out=found_LRR)


def polar_roots_start(Z_LRR: Tensor, factor_L: Tensor, now_L3RR: Tensor, inverse_root_L: Tensor) -> None:
    """Multiply Z by a factor; set two matrices to I and Z / |Z|; compute |Z|^-1/2."""
    size_L11 = torch.linalg.matrix_norm(Z_LRR.mul_(factor_L[:, None, None]), keepdim=True)
    now_L3RR[:, 1] = _eye(Z_LRR.shape[1], Z_LRR.device)
    torch.div(Z_LRR, size_L11, out=now_L3RR[:, 2])
    torch.rsqrt(size_L11.flatten(), out=inverse_root_L)


def polar_spectrum(S_LRR: Tensor, square_LRR: Tensor, sum_sq_L: Tensor, shares_4L: Tensor, numbers_6L: Tensor, M_LRR: Tensor,
                   rho_L: Tensor, is_finite_L: Tensor) -> None:
    """Compute the M and rho of an update from S and Z^2."""
    dim_L, rest_L, _, _, epsilon_L, delta_L = numbers_6L.unbind()
    trace_F_L = torch.addcmul(_trace(M_LRR), dim_L, rho_L)
    trace_T_L = torch.addcmul(shares_4L[1] * trace_F_L, shares_4L[0], sum_sq_L)
    new_rho_L = (trace_T_L - _trace(S_LRR)) / rest_L                                       # (59)
    rank_L1 = (dim_L - rest_L)[:, None]
    eye_LRR = (torch.arange(M_LRR.shape[1], device=M_LRR.device) < rank_L1).double().diag_embed()
    new_M_LRR = torch.addcmul(S_LRR, eye_LRR, new_rho_L[:, None, None], value=-1)
    # A bound of the largest eigenvalue of S, at most R^(1/8) times as large.
    largest_L = torch.linalg.matrix_norm(square_LRR) ** 0.25
    new_rho_L = torch.maximum(new_rho_L, torch.maximum(epsilon_L, delta_L * largest_L))    # (61)
    torch.lt(new_rho_L, math.inf, out=is_finite_L)
    torch.where(is_finite_L[:, None, None], new_M_LRR, M_LRR, out=M_LRR)
    torch.where(is_finite_L, new_rho_L, rho_L, out=rho_L)


def polar_inverse_start(M_LRR: Tensor, square_LRR: Tensor, rho_L: Tensor, numbers_6L: Tensor, PA_LRR: Tensor, B_LRR: Tensor,
                        ratio_L: Tensor) -> None:
    """Set B to beta I + M relative to a bound of its largest eigenvalue, P to I and A to B."""
    beta_L = torch.addcmul(numbers_6L[2] * rho_L, numbers_6L[3], _trace(M_LRR))
    largest_L = beta_L + torch.linalg.matrix_norm(square_LRR).sqrt()
    one_RR = _eye(M_LRR.shape[1], M_LRR.device)
    torch.div(torch.addcmul(M_LRR, one_RR, beta_L[:, None, None]), largest_L[:, None, None], out=B_LRR)
    torch.cat([one_RR.expand_as(M_LRR), B_LRR], dim=1, out=PA_LRR)
    torch.div(beta_L, largest_L, out=ratio_L)


triton_kernels.register("polar_update", {
    polar_kept: "Tensor M_LRR, Tensor rho_L, Tensor keep_L, Tensor(a!) found_LRR",
    polar_roots_start: "Tensor(a!) Z_LRR, Tensor factor_L, Tensor(b!) now_L3RR, Tensor(c!) "
                       "inverse_root_L",
    polar_spectrum: "Tensor S_LRR, Tensor square_LRR, Tensor sum_sq_L, Tensor shares_4L, Tensor "
                    "numbers_6L, Tensor(a!) M_LRR, Tensor(b!) rho_L, Tensor(c!) is_finite_L",
    polar_inverse_start: "Tensor M_LRR, Tensor square_LRR, Tensor rho_L, Tensor numbers_6L, "
                         "Tensor(a!) PA_LRR, Tensor(b!) B_LRR, Tensor(c!) ratio_L"}, torch.float64)


@functools.cache
def _eye(size: int, device: torch.device, value: float = 1.0) -> Tensor:
    """Return a multiple of the identity, float64; read-only."""
    return torch.eye(size, dtype=torch.float64, device=device) * value


def _trace(M_LRR: Tensor) -> Tensor:
    return M_LRR.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


@functools.cache
def _root_steps(least: float) -> list[tuple[float, float]]:
    """Return (a, b) of steps s <- s (a + b s^2) that bring s from `least` .. 1 nearest to 1."""
    steps, low, high, error = [], least, 1.0, 1.0
    while error > _PRECISION:
        q = (low * low + low * high + high * high) / 3
        b = -2 / (2 * q**1.5 + low * (3 * q - low * low))
        a = -3 * q * b
        steps.append((a, b))
        error = -2 * b * q**1.5 - 1
        low, high = 1 - error, 1 + error
    return steps


@functools.cache
def _inverse_steps(least: float) -> list[tuple[float, float]]:
    """Return (a, b) of steps s <- s (a - b s) that bring s from `least` .. 1 nearest to 1."""
    # 1 - s (a - b s) is a Chebyshev polynomial.
    steps, low, high, error = [], least, 1.0, 1.0
    while error > _PRECISION:
        center, width = high + low, high - low
        error = 1 / (2 * (center / width) ** 2 - 1)
        steps.append((8 * center * error / width**2, 8 * error / width**2))
        low, high = 1 - error, 1 + error
    return steps


def eta_of(num_rows: Tensor | float, num_samples_history: float, num_minibatches_history: float) -> Tensor | float:
    """Return the forgetting rate (78) of a number of rows, also of one on a device."""
    if num_minibatches_history > 0.0:
        return 1.0 / num_minibatches_history
    if isinstance(num_rows, Tensor):
        return (-torch.expm1(num_rows.double() / -num_samples_history)).clamp(max=0.9)
    return min(0.9, 1.0 - math.exp(-num_rows / num_samples_history))
