"""The "simple" natural gradient: multiply each row by the inverse Fisher matrix of the others.

Appendix A of arXiv 1410.7455 (nnet2/nnet-precondition.cc); equation numbers are those of the paper.
Letters: N rows, D dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ngsgd.arguments import checks_arguments
from ngsgd.errors import ArgumentError, DivergenceError
from ngsgd.ops.tensors import require_real

# Kaldi's floor of X X^T, below which it does not change rows.
_MIN_TRACE = 1e-20


@checks_arguments()
def precondition_simple(X_ND: Tensor, alpha: float = 4.0) -> Tensor:
    """Precondition each row with the other rows of the minibatch, and restore the norm of X.

    Row i is multiplied by the inverse of G_i = sum over j != i of x_j x_j^T / (N - 1) + lambda I.
    The inverse is computed as D x D or N x N, whichever is smaller.

    Source: arXiv 1410.7455, Appendix A.

    Args:
        X_ND: rows, not modified: float64, float32, bfloat16 or float16; computed in float64.
        alpha: smoothing towards the identity, in units of the mean eigenvalue. Default 4, as in
            Kaldi.

    Returns:
        Xbar, N x D, in the dtype of the rows. A single row, or rows of zeros, are returned
        unchanged. A scale of the rows is a scale of the result; Kaldi's code has a floor and hardly
        changes rows with |X|^2 below 1e-20.

    Raises:
        ArgumentError: the rows are no matrix of real numbers, or alpha is not positive and finite.
        DivergenceError: rows are not finite, or so badly scaled that no inverse exists.

    Example:
        >>> X = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]])
        >>> Xbar = precondition_simple(X)
        >>> torch.allclose(Xbar.norm(), X.norm())
        True
    """
    if not 0.0 < alpha < math.inf:
        raise ArgumentError(f"Invalid alpha: {alpha}; it must be greater than 0, and finite")
    require_real(X_ND, "X_ND", "precondition_simple", ndim=2)
    N, D = X_ND.shape
    sum_sq = X_ND.double().square().sum()
    if not bool(torch.isfinite(sum_sq)):
        raise DivergenceError(f"the rows given to the simple natural gradient ({N} x {D}) are not finite; lower the learning rate.")
    if N <= 1 or not bool(X_ND.any()):
        return X_ND.clone()
    if sum_sq < _MIN_TRACE:
        # Squares of small rows would vanish, in the floor or in rounding.
        largest = X_ND.detach().abs().max().double()
        small_ND: Tensor = (precondition_simple(X_ND.double() / largest, alpha) * largest).to(X_ND.dtype)
        return small_ND
    lam = alpha / (N * D) * sum_sq  # (8)
    Q_ND = column_space(X_ND, lam) if N >= D else row_space(X_ND, lam)
    Xhat_ND = _held_out(X_ND, Q_ND)
    gamma = (sum_sq / Xhat_ND.square().sum()).sqrt()  # (12)
    Xbar_ND: Tensor = (gamma * Xhat_ND).to(X_ND.dtype)      # (11)
    return Xbar_ND


def column_space(X_ND: Tensor, lam: Tensor) -> Tensor:
    """Return Q = X G^-1 (14), with G = X^T X / (N - 1) + lambda I (13)."""
    X_ND = X_ND.double()
    G_DD = X_ND.T @ X_ND / (len(X_ND) - 1)
    G_DD.diagonal().add_(lam)
    return torch.cholesky_solve(X_ND.T, _cholesky(G_DD)).T


def row_space(X_ND: Tensor, lam: Tensor) -> Tensor:
    """Return the same Q by an N x N inverse, for fewer rows than columns."""
    X_ND = X_ND.double()
    G_NN = X_ND @ X_ND.T / (len(X_ND) - 1)
    G_NN.diagonal().add_(lam)
    return torch.cholesky_solve(X_ND, _cholesky(G_NN))


def _held_out(X_ND: Tensor, Q_ND: Tensor) -> Tensor:
    """Return Xhat: remove each row's contribution from its G, by the Sherman-Morrison formula."""
    a_N = (X_ND * Q_ND).sum(dim=1)                         # (15)
    b_N = 1.0 + a_N / (len(X_ND) - 1 - a_N)                # (16)
    if bool((a_N < 0.0).any() | ~(b_N > 0.0).all()):
        raise DivergenceError("a minibatch of the simple natural gradient is numerically singular; "
                              "use a larger alpha.")
    Xhat_ND: Tensor = b_N[:, None] * Q_ND                  # (17)
    return Xhat_ND


def _cholesky(G: Tensor) -> Tensor:
    L: Tensor
    L, info = torch.linalg.cholesky_ex(G)
    if int(info) != 0:
        raise DivergenceError("the Fisher matrix of a minibatch is singular to working precision; use a larger alpha.")
    return L
