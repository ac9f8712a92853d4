"""Online natural gradient: the arithmetic of one call, as pure functions.

Appendix B of arXiv 1410.7455 as Kaldi runs it (nnet3/natural-gradient-online.cc); equation numbers are the paper's.
Where paper and Kaldi differ, Kaldi is followed: that is what people have trained with.

Letters: N rows (frames) of a minibatch, D their dimension, R the rank of the Fisher estimate
    F_t = R_t^T D_t R_t + rho_t I            (18)
held as W = E^(1/2) R_t (R x D), d = diag(D_t) (R) and rho.  Large products run in the dtype of X; everything R x R runs
in float64, which costs nothing beside them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_REORTHOGONALISE_RATIO = 1e6  # of largest to smallest eigenvalue of Z; beyond it float32 rows of R lose orthogonality
_ORTHOGONALITY_ERROR = 1e-3   # largest |R R^T - I| that is left alone
_CHOLESKY_LIMIT = 100.0       # larger elements of the inverse factor mean that O is too near singular to be used


class FisherState(NamedTuple):
    """The low-rank Fisher estimate F_t."""

    W_RD: Tensor   # E^(1/2) R_t, in the dtype of the rows it meets
    d_R: Tensor    # float64
    rho: Tensor    # 0-d, float64


class Smoothing(NamedTuple):
    """Constants of the estimate."""

    alpha: float    # weight of the identity in G_t, in units of the mean eigenvalue (19)
    epsilon: float  # absolute floor of d and rho (30)
    delta: float    # floor of d and rho relative to the largest eigenvalue; Kaldi's, not in the paper


def initial_state(dim: int, rank: int, smoothing: Smoothing, like: Tensor) -> FisherState:
    """Kaldi's fixed start before any data: rank `rank` < `dim`, rows spread over all columns, no random numbers."""
    R_RD = torch.zeros(rank, dim, dtype=torch.float64)
    row = torch.arange(rank)
    column = torch.arange(dim)
    R_RD[column % rank, column] = 1.0
    R_RD[row, row] = 1.1
    R_RD /= R_RD.norm(dim=1, keepdim=True)
    # e of (43) for d = rho = epsilon
    e = 1.0 / (2.0 + (dim + rank) * smoothing.alpha / dim)
    start = torch.full((rank,), smoothing.epsilon, dtype=torch.float64, device=like.device)
    return FisherState((math.sqrt(e) * R_RD).to(like), start, start[0].clone())


def forgetting_rate(num_rows: int, num_samples_history: float, num_minibatches_history: float) -> float:
    """eta of (78); capped at 0.9 so that one large minibatch never erases the past."""
    if num_minibatches_history > 0.0:
        return 1.0 / num_minibatches_history
    return min(0.9, 1.0 - math.exp(-num_rows / num_samples_history))


def precondition(X_ND: Tensor, W_RD: Tensor) -> tuple[Tensor, Tensor]:
    """(Xhat, H): rows multiplied by beta_t G_t^-1 (36), not yet rescaled."""
    H_NR = X_ND @ W_RD.T                                # (79)
    return torch.addmm(X_ND, H_NR, W_RD, alpha=-1), H_NR  # (80)


def updated_state(state: FisherState, X_ND: Tensor, H_NR: Tensor, sum_sq: Tensor, eta: float,
                  smoothing: Smoothing) -> FisherState:
    """F_{t+1} from F_t and the minibatch X; `sum_sq` is tr X X^T.

    A minibatch whose products are not finite returns the state it was given, so nothing bad ever enters it.
    """
    W_RD, d_R, rho = state
    N, D = X_ND.shape
    J_RD = H_NR.T @ X_ND                                                    # (81)
    K_RR, L_RR = (J_RD @ J_RD.T).double(), (H_NR.T @ H_NR).double()         # (84)
    share = eta / N
    e_R = _e(d_R, rho, D, smoothing.alpha)
    Z_RR = _z(K_RR, L_RR, e_R, d_R + rho, share, eta)
    if not bool(torch.isfinite(Z_RR).all() & torch.isfinite(sum_sq)):       # the one host sync of an update, with the next
        return state
    c_R, U_RR = _descending_eigh(Z_RR)                                      # (58)
    c_floor = (rho * (1.0 - eta)) ** 2
    is_floored = c_R[-1] < c_floor
    must_reorthogonalise = bool((c_R[0] > _REORTHOGONALISE_RATIO * c_R[-1]) | is_floored)
    c_R = c_R.clamp(min=float(c_floor))
    d_next_R, rho_next = _floored_eigenvalues(c_R, state, D, share, eta, sum_sq.double(), smoothing)
    e_next_R = _e(d_next_R, rho_next, D, smoothing.alpha)                   # (62, 63)
    A_RR = share * (e_next_R / c_R).sqrt()[:, None] * U_RR.T * e_R.rsqrt()  # (69)
    B_RD = torch.addcmul(J_RD, ((1.0 - eta) / share * (d_R + rho)).to(W_RD)[:, None], W_RD)  # (70)
    W_next_RD = A_RR.to(W_RD) @ B_RD                                        # (64)
    if must_reorthogonalise:
        W_next_RD = reorthogonalised(W_next_RD, e_next_R)
    return FisherState(W_next_RD, d_next_R, rho_next)


def _e(d_R: Tensor, rho: Tensor, dim: int, alpha: float) -> Tensor:
    beta = rho * (1.0 + alpha) + alpha / dim * d_R.sum()                    # (35)
    return 1.0 / (beta / d_R + 1.0)                                         # (43)


def _z(K_RR: Tensor, L_RR: Tensor, e_R: Tensor, d_rho_R: Tensor, share: float, eta: float) -> Tensor:
    """Z_t = Y_t Y_t^T by (56, 57), from R x R products alone."""
    whiten_RR = e_R.rsqrt()[:, None] * e_R.rsqrt()
    cross_RR = share * (1.0 - eta) * whiten_RR * L_RR * (d_rho_R[:, None] + d_rho_R)
    return share**2 * whiten_RR * K_RR + cross_RR + torch.diag(((1.0 - eta) * d_rho_R) ** 2)


def _descending_eigh(Z_RR: Tensor) -> tuple[Tensor, Tensor]:
    # Kaldi divides by the trace before the decomposition: keeps tiny inputs (2^-40) away from the underflow of LAPACK
    size = Z_RR.diagonal().sum().clamp(min=1.0)
    c_R, U_RR = torch.linalg.eigh(Z_RR / size)
    return (c_R * size).flip(0), U_RR.flip(1)


def _floored_eigenvalues(c_R: Tensor, state: FisherState, D: int, share: float, eta: float, sum_sq: Tensor,
                         smoothing: Smoothing) -> tuple[Tensor, Tensor]:
    """(d, rho) of F_{t+1}: trace-preserving, then floored."""
    sqrt_c_R = c_R.sqrt()
    trace_T = share * sum_sq + (1.0 - eta) * (D * state.rho + state.d_R.sum())
    rho = (trace_T - sqrt_c_R.sum()) / (D - len(c_R))                       # (59)
    floor = (smoothing.delta * sqrt_c_R.max()).clamp(min=smoothing.epsilon)
    # d comes from rho as it was before flooring, as in Kaldi; (60) read literally would differ
    return torch.maximum(sqrt_c_R - rho, floor), torch.maximum(rho, floor)  # (60, 61)


def reorthogonalised(W_RD: Tensor, e_R: Tensor) -> Tensor:
    """W with the rows of R = E^(-1/2) W made orthonormal again (71, 72), where rounding has spoilt them."""
    W64_RD: Tensor = W_RD.double()
    O_RR = e_R.rsqrt()[:, None] * (W64_RD @ W64_RD.T) * e_R.rsqrt()
    error = (O_RR - torch.eye(len(e_R), dtype=O_RR.dtype, device=O_RR.device)).abs().max()
    if error <= _ORTHOGONALITY_ERROR:
        return W_RD
    C_RR, info = torch.linalg.cholesky_ex(O_RR)
    if info == 0:
        C_inverse_RR = torch.linalg.solve_triangular(C_RR, torch.eye(len(e_R)).to(C_RR), upper=False)
        if C_inverse_RR.abs().max() < _CHOLESKY_LIMIT:
            W64_RD = (e_R.sqrt()[:, None] * C_inverse_RR * e_R.rsqrt()) @ W64_RD
            return W64_RD.to(W_RD)
    # Householder QR in place of Kaldi's Gram-Schmidt: the same rows up to rounding, and zero rows get a direction too
    Q_DR, T_RR = torch.linalg.qr(W64_RD.T)
    sign_R = torch.where(T_RR.diagonal() < 0.0, -1.0, 1.0)
    orthonormal_RD: Tensor = (Q_DR * sign_R).T
    return (e_R.sqrt()[:, None] * orthonormal_RD).to(W_RD)
