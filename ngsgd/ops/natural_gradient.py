"""Online natural gradient: the arithmetic of one call, as pure functions.

Appendix B of arXiv 1410.7455 as Kaldi runs it (nnet3/natural-gradient-online.cc); equation numbers are the paper's.
Where paper and Kaldi differ, Kaldi is followed: that is what people have trained with.

Letters: N rows (frames) of a minibatch, D their dimension, R the rank of the Fisher estimate
    F_t = R_t^T D_t R_t + rho_t I            (18)
held as W = E^(1/2) R_t (R x D), d = diag(D_t) (R) and rho.  Products of the size of the minibatch run on its device and in
its dtype.  Everything R x R runs on the host in float64: it costs next to nothing there, and a GPU waits for it once at most.

Rows of an affine layer end in a 1 for the bias.  That column `one_N` is kept apart, so that nobody copies the rows to append
it; W has its entries in the last column.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.ops import gemm

Array = npt.NDArray[np.float64]

# of largest to smallest eigenvalue of Z; beyond it float32 rows of R lose orthogonality
_REORTHOGONALIZE_RATIO = 1e6
# largest |R R^T - I| that is left alone
_ORTHOGONALITY_ERROR = 1e-3
# smallest floor: rows of 1e-10, as those of a mean over 1e9 samples.  Squares of its square still
# fit into float64 and float32
SMALLEST_EIGENVALUE = 1e-20
# larger elements of the inverse factor mean that O is too near singular to be used
_CHOLESKY_LIMIT = 100.0


class FisherState(NamedTuple):
    """The low-rank Fisher estimate F_t."""

    # E^(1/2) R_t, where and in the dtype of the rows it meets
    W_RD: Tensor
    # on the host, as is rho
    d_R: Array
    rho: float


class Smoothing(NamedTuple):
    """Constants of the estimate."""

    # weight of the identity in G_t, in units of the mean eigenvalue (19)
    alpha: float
    # absolute floor of d and rho (30), and their value at the start
    epsilon: float
    # floor of d and rho relative to the largest eigenvalue; Kaldi's, not in the paper
    delta: float
    # small rows lower the absolute floor and the start
    is_relative: bool = False


class Moments(NamedTuple):
    """What an update needs of the minibatch, on the host."""

    K_RR: Array
    L_RR: Array
    sum_sq: float    # tr X X^T
    num_rows: float  # N, without masked rows
    # what the rows carry that the estimate must not: a loss scale
    scale: float


class FisherUpdate(NamedTuple):
    """Where the estimate goes: W' = A (J + diag(b) W), and the new eigenvalues."""

    A_RR: Array
    b_R: Array
    d_R: Array
    rho: float
    must_reorthogonalize: bool


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
    return FisherState((math.sqrt(e) * R_RD).to(like), np.full(rank, smoothing.epsilon), smoothing.epsilon)


def with_relative_start(state: FisherState, moments: Moments, dim: int, smoothing: Smoothing) -> tuple[FisherState, Smoothing]:
    """Lower the start of an estimate with a relative floor, where it outweighs the first rows that are not all zero.

    The start is then delta times the mean eigenvalue of these rows.  It would outweigh rows as small as the derivatives of a mean
    over thousands of samples.  Before them the floor stays absolute, as in Kaldi: layers below one that starts at zero have zero
    derivatives in the first minibatch, and ordinary ones from then on.
    """
    epsilon = smoothing.epsilon
    if state.rho != epsilon or (state.d_R != epsilon).any():
        return state, smoothing
    if moments.sum_sq == 0.0:
        return state, smoothing._replace(is_relative=False)
    mean_eigenvalue = moments.sum_sq / (moments.num_rows * dim * moments.scale**2)
    rho = max(min(epsilon, smoothing.delta * mean_eigenvalue), SMALLEST_EIGENVALUE)
    return state._replace(d_R=np.full_like(state.d_R, rho), rho=rho), smoothing


def forgetting_rate(num_rows: float, num_samples_history: float, num_minibatches_history: float) -> float:
    """eta of (78); capped at 0.9 so that one large minibatch never erases the past."""
    if num_minibatches_history > 0.0:
        return 1.0 / num_minibatches_history
    return min(0.9, 1.0 - math.exp(-num_rows / num_samples_history))


def rescaling(sum_sq: Tensor | float, sum_sq_hat: Tensor | float) -> Tensor | float:
    """gamma of (38), from tr X X^T and tr Xhat Xhat^T; 1 where there is nothing to rescale."""
    if isinstance(sum_sq, Tensor) or isinstance(sum_sq_hat, Tensor):
        return torch.nan_to_num(torch.as_tensor(sum_sq / sum_sq_hat).sqrt(), nan=1.0, posinf=1.0)
    gamma = math.sqrt(max(sum_sq, 0.0) / sum_sq_hat) if sum_sq_hat > 0.0 else 1.0
    return gamma if math.isfinite(gamma) else 1.0


def project_back(X_ND: Tensor, H_NR: Tensor, one_N: Tensor | None = None) -> Tensor:
    """J_t = H^T X (81)."""
    if one_N is None:
        return gemm.mm(H_NR.T, X_ND)
    J_RD = X_ND.new_empty(H_NR.shape[1], X_ND.shape[1] + 1)
    gemm.mm(H_NR.T, X_ND, out=J_RD[:, :-1])
    J_RD[:, -1] = torch.mv(H_NR.T, one_N)
    return J_RD


def moment_products(J_RD: Tensor, H_NR: Tensor) -> Tensor:
    """K = J J^T and L = H^T H (84), stacked."""
    KL_2RR = J_RD.new_empty(2, len(J_RD), len(J_RD))
    gemm.mm(J_RD, J_RD.T, out=KL_2RR[0])
    gemm.mm(H_NR.T, H_NR, out=KL_2RR[1])
    return KL_2RR


def wide_moments(J_RD: Tensor, moments: Moments) -> Moments:
    """The moments with K made in float64: it holds fourth powers, which pass float32's range at |x| of 5e8."""
    J64_RD = J_RD.double()
    return moments._replace(K_RR=(J64_RD @ J64_RD.T).cpu().numpy())


def compute_update(state: FisherState, moments: Moments, dim: int, eta: float,
                   smoothing: Smoothing) -> FisherUpdate | None:
    """From F_t to F_{t+1}; None where a product is not finite, so that nothing bad ever enters the estimate."""
    d_R, rho = state.d_R, state.rho
    share = eta / moments.num_rows / moments.scale**2
    e_R = _e(d_R, rho, dim, smoothing.alpha)
    Z_RR = _z(moments.K_RR, moments.L_RR, e_R, d_R + rho, share, eta)
    if not (math.isfinite(moments.sum_sq) and np.isfinite(Z_RR).all()):
        return None
    c_R, U_RR = _descending_eigh(Z_RR)                                        # (58)
    c_floor = (rho * (1.0 - eta)) ** 2
    must_reorthogonalize = bool(c_R[0] > _REORTHOGONALIZE_RATIO * c_R[-1] or c_R[-1] < c_floor)
    c_R = np.maximum(c_R, c_floor)
    d_next_R, rho_next = _floored_eigenvalues(c_R, state, dim, share, eta, moments.sum_sq, smoothing)
    e_next_R = _e(d_next_R, rho_next, dim, smoothing.alpha)                   # (62, 63)
    A_RR = (share * np.sqrt(e_next_R / c_R))[:, None] * U_RR.T / np.sqrt(e_R)  # (69)
    b_R = (1.0 - eta) / share * (d_R + rho)                                   # (70)
    return FisherUpdate(A_RR, b_R, d_next_R, rho_next, must_reorthogonalize)


def apply_update(state: FisherState, J_RD: Tensor, step: FisherUpdate,
                 smoothing: Smoothing) -> FisherState:
    """F_{t+1}; overwrites J and the W of `state`, for memory's sake."""
    W_RD = state.W_RD
    b_R1 = torch.from_numpy(step.b_R).to(W_RD)[:, None]
    A_RR = torch.from_numpy(step.A_RR).to(W_RD)
    gemm.mm(A_RR, J_RD.addcmul_(b_R1, W_RD), out=W_RD)                        # (64)
    if step.must_reorthogonalize:
        e_R = _e(step.d_R, step.rho, W_RD.shape[1], smoothing.alpha)
        W_RD = reorthogonalized(W_RD, torch.from_numpy(e_R).to(W_RD.device))
    return FisherState(W_RD, step.d_R, step.rho)


def resmoothed(state: FisherState, old: Smoothing, new: Smoothing) -> FisherState:
    """The same estimate for another alpha."""
    W_RD = state.W_RD
    ratio_R = np.sqrt(_e(state.d_R, state.rho, W_RD.shape[1], new.alpha) / _e(state.d_R, state.rho, W_RD.shape[1], old.alpha))
    return state._replace(W_RD=torch.from_numpy(ratio_R).to(W_RD)[:, None] * W_RD)


def spectrum(state: FisherState, smoothing: Smoothing) -> Array:
    """e_i (43), descending: how far each of the R directions is shortened, 0 not at all, 1 to nothing."""
    return _e(state.d_R, state.rho, state.W_RD.shape[1], smoothing.alpha)


def _e(d_R: Array, rho: float, dim: int, alpha: float) -> Array:
    beta = rho * (1.0 + alpha) + alpha / dim * d_R.sum()                      # (35)
    return np.asarray(d_R / (beta + d_R))                                     # (43)


def _z(K_RR: Array, L_RR: Array, e_R: Array, d_rho_R: Array, share: float, eta: float) -> Array:
    """Z_t = Y_t Y_t^T by (56, 57), from R x R products alone."""
    sqrt_e_R = np.sqrt(e_R)
    whiten_R = share / sqrt_e_R
    keep_R = (1.0 - eta) * d_rho_R
    Z_RR = keep_R[:, None] + keep_R
    Z_RR /= sqrt_e_R
    Z_RR *= L_RR
    Z_RR += K_RR * whiten_R
    Z_RR *= whiten_R[:, None]
    Z_RR.flat[::len(Z_RR) + 1] += keep_R**2
    return Z_RR


def _descending_eigh(Z_RR: Array) -> tuple[Array, Array]:
    # Kaldi divides by the trace before the decomposition: keeps huge inputs away from the overflow
    # of LAPACK
    size = max(1.0, float(np.trace(Z_RR)))
    # torch's LAPACK keeps to the threads torch was given
    c_R, U_RR = torch.linalg.eigh(torch.from_numpy(Z_RR / size))
    return c_R.numpy()[::-1] * size, U_RR.numpy()[:, ::-1]


def _floored_eigenvalues(c_R: Array, state: FisherState, dim: int, share: float, eta: float, sum_sq: float,
                         smoothing: Smoothing) -> tuple[Array, float]:
    """(d, rho) of F_{t+1}: trace-preserving, then floored."""
    sqrt_c_R = np.sqrt(c_R)
    trace_T = share * sum_sq + (1.0 - eta) * (dim * state.rho + float(state.d_R.sum()))
    rho = (trace_T - float(sqrt_c_R.sum())) / (dim - len(c_R))                # (59)
    # epsilon is the larger one where all eigenvalues are below 2e-7, and flattens the estimate
    # there
    floor = max(SMALLEST_EIGENVALUE if smoothing.is_relative else smoothing.epsilon, smoothing.delta * float(sqrt_c_R.max()))
    # d comes from rho as it was before flooring, as in Kaldi; (60) read literally would differ
    return np.maximum(sqrt_c_R - rho, floor), max(rho, floor)                 # (60, 61)


def reorthogonalized(W_RD: Tensor, e_R: Tensor) -> Tensor:
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
    # Householder QR in place of Kaldi's Gram-Schmidt: the same rows up to rounding, and zero rows
    # get a direction too
    Q_DR, T_RR = torch.linalg.qr(W64_RD.T)
    sign_R = torch.where(T_RR.diagonal() < 0.0, -1.0, 1.0)
    orthonormal_RD: Tensor = (Q_DR * sign_R).T
    return (e_R.sqrt()[:, None] * orthonormal_RD).to(W_RD).contiguous()
