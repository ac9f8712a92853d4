"""Online natural gradient: the arithmetic of one call, as pure functions.

Appendix B of arXiv 1410.7455 as Kaldi implements it (nnet3/natural-gradient-online.cc); equation
numbers are those of the paper. Where the paper and Kaldi differ, this follows Kaldi.

Letters: N rows (frames) of a minibatch, D their dimension, R the rank of the Fisher estimate
    F_t = R_t^T D_t R_t + rho_t I            (18)

It is stored as W = E^(1/2) R_t (R x D), d = diag(D_t) (R) and rho. GEMMs of the size of the
minibatch run on its device, R x R algebra in float64 on the host; a GPU is synchronized at most
once. The column `one_N` of ones for the bias is a separate argument, to avoid a copy of the rows; W
has its entries in the last column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.ops import gemm

Array = npt.NDArray[np.float64]

# ratio of the extreme eigenvalues of Z beyond which float32 rows of R lose orthogonality
_REORTHOGONALIZE_RATIO = 1e6
# largest |R R^T - I| without correction
_ORTHOGONALITY_ERROR = 1e-3
# Smallest floor, for rows of 1e-10, such as those of a mean over 1e9 samples. Squares of its square
# still fit into float64 and float32.
SMALLEST_EIGENVALUE = 1e-20
# Larger elements of the inverse factor mean that O is nearly singular.
_CHOLESKY_LIMIT = 100.0


class FisherState(NamedTuple):
    """The low-rank Fisher estimate F_t."""

    # E^(1/2) R_t, on the device and in the dtype of the rows
    W_RD: Tensor
    # on the host, as is rho
    d_R: Array
    rho: float

    @property
    def left_RD(self) -> Tensor:  # noqa: N802
        """Rows are preconditioned as X - (X left^T) right."""
        return self.W_RD

    @property
    def right_RD(self) -> Tensor:  # noqa: N802
        """See `left_RD`."""
        return self.W_RD


class Smoothing(NamedTuple):
    """Constants of the estimate."""

    # weight of the identity in G_t, in units of the mean eigenvalue (19)
    alpha: float
    # absolute floor of d and rho (30), and their initial value
    epsilon: float
    # floor of d and rho relative to the largest eigenvalue; in Kaldi only
    delta: float
    # Small rows lower the absolute floor and the initial value.
    is_relative: bool = False


class Moments(NamedTuple):
    """Moments of a minibatch that an update needs, on the host."""

    K_RR: Array
    L_RR: Array
    sum_sq: float    # tr X X^T
    num_rows: float  # N, without masked rows
    # factor of the rows that must not enter the estimate: a loss scale
    scale: float


class UpdateProblem(NamedTuple):
    """An estimate, the moments of its minibatch, and its constants."""

    state: FisherState
    moments: Moments
    dim: int
    eta: float
    smoothing: Smoothing


class FisherUpdate(NamedTuple):
    """New estimate: W' = A (J + diag(b) W), and the new eigenvalues."""

    A_RR: Array
    b_R: Array
    d_R: Array
    rho: float
    must_reorthogonalize: bool


def initial_state(dim: int, rank: int, smoothing: Smoothing, like: Tensor) -> FisherState:
    """Create Kaldi's initial estimate of `rank` < `dim`: rows spread over all columns."""
    R_RD = torch.zeros(rank, dim, dtype=torch.float64)
    row, column = torch.arange(rank), torch.arange(dim)
    R_RD[column % rank, column] = 1.0
    R_RD[row, row] = 1.1
    R_RD /= R_RD.norm(dim=1, keepdim=True)
    # e of (43) for d = rho = epsilon
    e = 1.0 / (2.0 + (dim + rank) * smoothing.alpha / dim)
    return FisherState((math.sqrt(e) * R_RD).to(like), np.full(rank, smoothing.epsilon), smoothing.epsilon)


def with_relative_start(state: FisherState, moments: Moments, dim: int, smoothing: Smoothing) -> tuple[FisherState, Smoothing]:
    """Lower the initial value of an estimate with a relative floor, if first rows are smaller.

    The new initial value is delta times the mean eigenvalue of these rows. The absolute one would
    dominate small rows, such as derivatives of a mean over thousands of samples. Until then the
    floor stays absolute, as in Kaldi: layers below a zero-initialized layer have zero derivatives
    in the first minibatch only.
    """
    epsilon = smoothing.epsilon
    if not is_initial(state, smoothing):
        return state, smoothing
    if moments.sum_sq == 0.0:
        return state, smoothing._replace(is_relative=False)
    mean_eigenvalue = moments.sum_sq / (moments.num_rows * dim * moments.scale**2)
    rho = max(min(epsilon, smoothing.delta * mean_eigenvalue), SMALLEST_EIGENVALUE)
    return state._replace(d_R=np.full_like(state.d_R, rho), rho=rho), smoothing


def is_initial(state: FisherState, smoothing: Smoothing) -> bool:
    """Return whether no nonzero rows have changed the eigenvalues yet."""
    return state.rho == smoothing.epsilon and bool((state.d_R == smoothing.epsilon).all())


def forgetting_rate(num_rows: float, num_samples_history: float, num_minibatches_history: float) -> float:
    """Return eta of (78), at most 0.9, so that one large minibatch never replaces the past."""
    if num_minibatches_history > 0.0:
        return 1.0 / num_minibatches_history
    return min(0.9, 1.0 - math.exp(-num_rows / num_samples_history))


def rescaling(sum_sq: Tensor | float, sum_sq_hat: Tensor | float) -> Tensor | float:
    """Return gamma of (38) from tr X X^T and tr Xhat Xhat^T; 1 if there is nothing to rescale."""
    if isinstance(sum_sq, Tensor) or isinstance(sum_sq_hat, Tensor):
        return torch.nan_to_num(torch.as_tensor(sum_sq / sum_sq_hat).sqrt(), nan=1.0, posinf=1.0)
    gamma = math.sqrt(max(sum_sq, 0.0) / sum_sq_hat) if sum_sq_hat > 0.0 else 1.0
    return gamma if math.isfinite(gamma) else 1.0


def expected_rescaling(state: FisherState, smoothing: Smoothing) -> float:
    """Return gamma of (38) for rows whose scatter matrix is a multiple of the estimate."""
    d_R, rho, dim = state.d_R, state.rho, state.W_RD.shape[1]
    sum_d = float(d_R.sum())
    beta = _beta(d_R, rho, dim, smoothing.alpha)
    kept_R = beta / (beta + d_R)
    kept_R *= kept_R
    sum_hat = float(kept_R @ d_R) + rho * (float(kept_R.sum()) + dim - len(d_R))
    return float(rescaling(sum_d + rho * dim, sum_hat))


def project_back(X_ND: Tensor, H_NR: Tensor, one_N: Tensor | None = None) -> Tensor:
    """Return J_t = H^T X (81)."""
    if one_N is None:
        return gemm.mm(H_NR.T, X_ND)
    J_RD = X_ND.new_empty(H_NR.shape[1], X_ND.shape[1] + 1)
    gemm.mm(H_NR.T, X_ND, out=J_RD[:, :-1])
    J_RD[:, -1] = torch.mv(H_NR.T, one_N)
    return J_RD


def moment_products(J_RD: Tensor, H_NR: Tensor) -> Tensor:
    """Return K = J J^T and L = H^T H (84), stacked."""
    rank = J_RD.shape[0]
    KL_2RR = J_RD.new_empty(2, rank, rank)
    gemm.mm(J_RD, J_RD.T, out=KL_2RR[0])
    gemm.mm(H_NR.T, H_NR, out=KL_2RR[1])
    return KL_2RR


def wide_moments(J_RD: Tensor, moments: Moments) -> Moments:
    """Return the moments with K in float64: its fourth powers exceed float32 at |x| of 5e8."""
    J64_RD = J_RD.double()
    return moments._replace(K_RR=(J64_RD @ J64_RD.T).cpu().numpy())


def compute_updates(problems: Sequence[UpdateProblem]) -> list[FisherUpdate | None]:
    """Compute F_{t+1} from F_t for B estimates of one rank, bitwise as by B single updates.

    The result is None if a product is not finite. For narrow layers, batching is faster.
    """
    states, moments, dims, etas, smoothings = zip(*problems, strict=True)
    d_BR = np.stack([state.d_R for state in states])
    rho_B, dim_B, eta_B, sum_sq_B = (np.array(numbers, dtype=np.float64) for numbers in (
        [state.rho for state in states], dims, etas, [one.sum_sq for one in moments]))
    alpha_B, delta_B, epsilon_B = (np.array(numbers) for numbers in (
        [one.alpha for one in smoothings], [one.delta for one in smoothings],
        [SMALLEST_EIGENVALUE if one.is_relative else one.epsilon for one in smoothings]))
    share_B = np.array([eta / one.num_rows / one.scale**2 for eta, one in zip(etas, moments, strict=True)])
    e_BR = _e(d_BR, rho_B, dim_B, alpha_B)
    Z_BRR = _z(np.stack([one.K_RR for one in moments]), np.stack([one.L_RR for one in moments]),
               e_BR, d_BR + rho_B[:, None], share_B, eta_B)
    is_finite_B = np.isfinite(sum_sq_B) & np.isfinite(Z_BRR).all(axis=(1, 2))
    Z_BRR[~is_finite_B] = 0.0
    c_BR, U_BRR = _descending_eigh(Z_BRR)  # (58)
    c_floor_B = np.array([(state.rho * (1.0 - eta)) ** 2 for state, eta in zip(states, etas, strict=True)])
    must_reorthogonalize_B = (c_BR[:, 0] > _REORTHOGONALIZE_RATIO * c_BR[:, -1]) | (c_BR[:, -1] < c_floor_B)
    c_BR = np.maximum(c_BR, c_floor_B[:, None])
    sqrt_c_BR = np.sqrt(c_BR)
    trace_T_B = share_B * sum_sq_B + (1.0 - eta_B) * (dim_B * rho_B + d_BR.sum(axis=1))
    rho_next_B = (trace_T_B - sqrt_c_BR.sum(axis=1)) / (dim_B - d_BR.shape[1])  # (59)
    # With all eigenvalues below 2e-7, epsilon is larger than delta's floor and flattens the
    # estimate.
    floor_B = np.maximum(epsilon_B, delta_B * sqrt_c_BR.max(axis=1))
    # d uses rho before flooring, as in Kaldi; (60) taken literally would differ.
    d_next_BR = np.maximum(sqrt_c_BR - rho_next_B[:, None], floor_B[:, None])  # (60)
    rho_next_B = np.maximum(rho_next_B, floor_B)                              # (61)
    e_next_BR = _e(d_next_BR, rho_next_B, dim_B, alpha_B)  # (62, 63)
    A_BRR = (
        (share_B[:, None] * np.sqrt(e_next_BR / c_BR))[:, :, None]
        * U_BRR.swapaxes(1, 2)
        / np.sqrt(e_BR)[:, None]
    )  # (69)
    b_BR = ((1.0 - eta_B) / share_B)[:, None] * (d_BR + rho_B[:, None])  # (70)
    return [FisherUpdate(A_BRR[i], b_BR[i], d_next_BR[i], float(rho_next_B[i]),
                         bool(must_reorthogonalize_B[i])) if is_finite_B[i] else None
            for i in range(len(states))]


def apply_update(state: FisherState, J_RD: Tensor, step: FisherUpdate, smoothing: Smoothing) -> FisherState:
    """Return F_{t+1}; overwrites J and the W of `state` to save memory."""
    W_RD = state.W_RD
    b_R1 = torch.from_numpy(step.b_R).to(W_RD)[:, None]
    A_RR = torch.from_numpy(step.A_RR).to(W_RD)
    gemm.mm(A_RR, J_RD.addcmul_(b_R1, W_RD), out=W_RD)                        # (64)
    if step.must_reorthogonalize:
        e_R = spectrum(FisherState(W_RD, step.d_R, step.rho), smoothing)
        W_RD = reorthogonalized(W_RD, torch.from_numpy(e_R).to(W_RD.device))
    return FisherState(W_RD, step.d_R, step.rho)


def resmoothed(state: FisherState, old: Smoothing, new: Smoothing) -> FisherState:
    """Return the same estimate for another alpha."""
    W_RD = state.W_RD
    ratio_R = np.sqrt(spectrum(state, new) / spectrum(state, old))
    return state._replace(W_RD=torch.from_numpy(ratio_R).to(W_RD)[:, None] * W_RD)


def spectrum(state: FisherState, smoothing: Smoothing) -> Array:
    """Return e_i (43), descending: 0 keeps a direction unchanged, 1 removes it."""
    rho_1, dim_1, alpha_1 = (np.array([number], dtype=np.float64)
                             for number in (state.rho, state.W_RD.shape[1], smoothing.alpha))
    e_R: Array = _e(state.d_R[None], rho_1, dim_1, alpha_1)[0]
    return e_R


def _e(d_BR: Array, rho_B: Array, dim_B: Array, alpha_B: Array) -> Array:
    return np.asarray(d_BR / (_beta(d_BR, rho_B, dim_B, alpha_B)[:, None] + d_BR))  # (43)


def _beta(d_BR: Array, rho_B: Any, dim_B: Any, alpha_B: Any) -> Any:
    return rho_B * (1.0 + alpha_B) + alpha_B / dim_B * d_BR.sum(axis=-1)     # (35)


def _z(K_BRR: Array, L_BRR: Array, e_BR: Array, d_rho_BR: Array, share_B: Array, eta_B: Array) -> Array:
    """Compute Z_t = Y_t Y_t^T by (56, 57), from R x R products only."""
    sqrt_e_BR = np.sqrt(e_BR)
    whiten_BR = share_B[:, None] / sqrt_e_BR
    keep_BR = (1.0 - eta_B)[:, None] * d_rho_BR
    Z_BRR = keep_BR[:, :, None] + keep_BR[:, None]
    Z_BRR /= sqrt_e_BR[:, None]
    Z_BRR *= L_BRR
    Z_BRR += K_BRR * whiten_BR[:, None]
    Z_BRR *= whiten_BR[:, :, None]
    diagonal = np.arange(Z_BRR.shape[1])
    Z_BRR[:, diagonal, diagonal] += keep_BR**2
    return Z_BRR


def _descending_eigh(Z_BRR: Array) -> tuple[Array, Array]:
    # Kaldi divides by the trace before the decomposition, which avoids overflow in LAPACK.
    size_B = np.maximum(1.0, np.trace(Z_BRR, axis1=1, axis2=2))
    # torch's LAPACK respects torch's number of threads. One matrix at a time, because the bits
    # depend on its memory alignment.
    found = [torch.linalg.eigh(Z_RR) for Z_RR in torch.from_numpy(Z_BRR / size_B[:, None, None])]
    c_BR, U_BRR = (np.stack([pair[i].numpy() for pair in found]) for i in range(2))
    return c_BR[:, ::-1] * size_B[:, None], U_BRR[:, :, ::-1]


def reorthogonalized(W_RD: Tensor, e_R: Tensor) -> Tensor:
    """Return W with rows of R = E^(-1/2) W made orthonormal again (71, 72), after rounding."""
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
    # Householder QR instead of Kaldi's Gram-Schmidt: the same rows up to rounding, and zero rows
    # get a direction.
    Q_DR, T_RR = torch.linalg.qr(W64_RD.T)
    sign_R = torch.where(T_RR.diagonal() < 0.0, -1.0, 1.0)
    orthonormal_RD: Tensor = (Q_DR * sign_R).T
    return (e_R.sqrt()[:, None] * orthonormal_RD).to(W_RD).contiguous()
