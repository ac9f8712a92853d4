"""Linear algebra of preconditioners: inverses, roots, linear systems, quasi-Newton updates.

Operations that fail in float32 are repeated in float64, and else raise DivergenceError.
Letters: D dimension, N rows (samples), X any number of columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ngsgd.errors import DivergenceError
from ngsgd.ops import gemm

# Rows of a triangular matrix per block.
_BLOCK = 256
# Per dimension; below it a factor is zero, and pi is undefined.
_MIN_TRACE = 1e-20


def damped_inverse(factor_DD: Tensor, damping: float, *, overwrite: bool = False) -> Tensor:
    """Return (factor + damping I)^-1 of a symmetric positive semidefinite matrix, by Cholesky.

    DivergenceError if the sum is not positive definite; `overwrite` reuses the factor's memory.

    Example:
        >>> damped_inverse(torch.tensor([[3.0]]), 1.0)
        tensor([[0.2500]])
    """
    if overwrite and factor_DD.is_contiguous() and factor_DD.ndim == 2:
        factor_DD.diagonal().add_(damping)
        root_DD, failure = torch.linalg.cholesky_ex(factor_DD)
        if not bool(failure):
            # column-major, as LAPACK writes
            torch.cholesky_inverse(root_DD, out=factor_DD.mT)
            return factor_DD
        # The factor already includes it.
        damping = 0.0
    # The transpose of the symmetric result is row-major, which avoids a copy.
    return torch.cholesky_inverse(damped_cholesky(factor_DD, damping)).to(factor_DD.dtype).mT


def damped_cholesky(factor_DD: Tensor, damping: float) -> Tensor:
    """Return the lower root of factor + damping I; in float64 if float32 is not sufficient."""
    for dtype in (factor_DD.dtype, torch.float64):
        damped_DD = factor_DD.to(dtype, copy=True)
        damped_DD.diagonal(dim1=-2, dim2=-1).add_(damping)
        root_DD: Tensor
        root_DD, failure = torch.linalg.cholesky_ex(damped_DD)
        if not bool(failure.any()):
            return root_DD
    raise DivergenceError(f"a curvature factor of dimension {factor_DD.shape[-1]} with damping "
                          f"{damping:g} is not positive definite; the loss may be NaN or Inf: "
                          "lower the learning rate or raise the damping.")


def shared_damping(B_OO: Tensor, A_II: Tensor, total: float) -> tuple[float, float]:
    """Return (damping of B, damping of A) of a Kronecker product; their product is the total."""
    return split_damping(float(A_II.trace()) / len(A_II), float(B_OO.trace()) / len(B_OO), total)


def split_damping(of_A: float, of_B: float, total: float) -> tuple[float, float]:
    """Return (damping of B, damping of A) from the mean eigenvalues of the factors."""
    pi = (of_A / of_B) ** 0.5 if min(of_A, of_B) > _MIN_TRACE else 1.0
    return total**0.5 / pi, total**0.5 * pi


def eigh(factor_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ascending eigenvalues, eigenvectors as columns); in float64 if float32 fails."""
    for dtype in (factor_DD.dtype, torch.float64):
        try:
            values_D, vectors_DD = torch.linalg.eigh(factor_DD.to(dtype))
        except RuntimeError:
            continue
        if bool(values_D.isfinite().all()):
            return values_D.to(factor_DD.dtype), vectors_DD.to(factor_DD.dtype)
    raise DivergenceError(f"the eigenvalues of a curvature factor of dimension {len(factor_DD)} "
                          "cannot be found; gradients may be NaN or Inf: lower the learning rate.")


def inverse_root(factor_DD: Tensor, root: int, ridge: float) -> Tensor:
    """Return (factor + ridge lmax I)^(-1/root) by eigenvalues; negative ones count as 0."""
    values_D, U_DD = eigh(factor_DD)
    values_D = values_D.clamp(min=0.0)
    damped_D = values_D + ridge * values_D[-1].clamp(min=torch.finfo(values_D.dtype).tiny)
    return gemm.mm(U_DD * damped_D.pow(-1.0 / root), U_DD.T)


def woodbury_rows(U_ND: Tensor, root_NN: Tensor, damping: float, x_XD: Tensor) -> Tensor:
    """Return x (U^T U + damping I)^-1 by the Cholesky root of U U^T + damping I; fast for N < D."""
    inner_NX = torch.cholesky_solve(gemm.mm(U_ND, x_XD.T).to(root_NN.dtype), root_NN).to(x_XD.dtype)
    return gemm.sub_matmul(x_XD, inner_NX.T, U_ND) / damping


def less_upper_product(Q_DD: Tensor, t_DD: Tensor) -> None:
    """Compute Q <- Q - t Q of upper triangular matrices in place, in a third of the operations."""
    # By torch's GEMM, which accepts a part of a matrix in place; oneDNN would copy it.
    # From the top: a block needs its rows of Q and those below, which are still unchanged.
    for first in range(0, len(Q_DD), _BLOCK):
        rows = slice(first, first + _BLOCK)
        Q_DD[rows, first:].sub_(t_DD[rows, first:] @ Q_DD[first:, first:])


def upper_gram(Q_DD: Tensor, out_DD: Tensor) -> Tensor:
    """Compute Q^T Q of an upper triangular Q, exactly symmetric, with a sixth of the operations."""
    for first in range(0, len(Q_DD), _BLOCK):
        rows, end = slice(first, first + _BLOCK), min(first + _BLOCK, len(Q_DD))
        out_DD[rows, first:] = Q_DD[:end, rows].T @ Q_DD[:end, first:]
        # A GEMM may sum entry (i, j) in another order than (j, i); MKL does on AMD processors.
        block_BB = out_DD[rows, rows]
        is_lower_BB = torch.ones_like(block_BB, dtype=torch.bool).tril_(-1)
        block_BB.copy_(torch.where(is_lower_BB, block_BB.T, block_BB))
        out_DD[end:, rows] = out_DD[rows, end:].T
    return out_DD


def conjugate_gradients(product: Callable[[Tensor], Tensor], right_D: Tensor, *, start_D: Tensor | None = None, max_steps: int = 50,
                        tolerance: float = 1e-6) -> tuple[Tensor, int]:
    """Solve A x = right for a symmetric matrix given as v -> A v; return (x, number of products).

    Ends when the residual is at most `tolerance` times the right side, or at a direction without
    positive curvature: x is then the last iterate, or the right side itself if there is none.

    Source: Hestenes and Stiefel 1952; Steihaug 1983, without a trust region.
    """
    x_D = torch.zeros_like(right_D) if start_D is None else start_D.clone()
    r_D = right_D.clone() if start_D is None else right_D - product(x_D)
    taken = 0 if start_D is None else 1
    p_D = r_D.clone()
    squares = r_D @ r_D
    goal = (tolerance * right_D.norm()) ** 2
    for step in range(max_steps):
        if not bool(squares > goal):
            break
        Ap_D = product(p_D)
        taken += 1
        curvature = p_D @ Ap_D
        if not bool(curvature > 0.0):
            return (x_D if step or start_D is not None else right_D.clone()), taken
        length = squares / curvature
        x_D = x_D + length * p_D
        r_D = r_D - length * Ap_D
        before, squares = squares, r_D @ r_D
        p_D = r_D + (squares / before) * p_D
    return x_D, taken


def doubly_damped(s_D: Tensor, y_D: Tensor, Hy_D: Tensor, *, least: float, damping: float) -> tuple[Tensor, Tensor]:
    """Damp a pair (s, y) so that a BFGS inverse H stays positive definite.

    Powell's damping moves s to H y until s^T y is `least` of y^T H y. Then y <- y + damping s, the
    curvature of a damped function.

    Source: Goldfarb, Ren and Bahamou 2020, algorithm 3.

    Example:
        >>> s, y = doubly_damped(torch.tensor([-1.0]), torch.tensor([2.0]), torch.tensor([2.0]), least=0.2, damping=0.0)
        >>> bool(torch.isclose(s @ y, torch.tensor(0.8)))      # 0.2 of y^T H y = 4
        True
    """
    yHy, sy = y_D @ Hy_D, s_D @ y_D
    if bool(sy < least * yHy):
        theta = (1.0 - least) * yHy / (yHy - sy)
        s_D = theta * s_D + (1.0 - theta) * Hy_D
    return s_D, y_D + damping * s_D


def bfgs_inverse(H_DD: Tensor, s_D: Tensor, y_D: Tensor) -> bool:
    """Update a BFGS inverse in place; then H y = s.

    H <- (I - r s y^T) H (I - r y s^T) + r s s^T with r = 1 / s^T y > 0.

    Returns:
        False, with H unchanged, if s^T y is not positive or a number would not be finite.

    Example:
        >>> H = torch.eye(1)
        >>> bfgs_inverse(H, torch.tensor([1.0]), torch.tensor([4.0])), H
        (True, tensor([[0.2500]]))
    """
    Hy_D, sy = H_DD @ y_D, s_D @ y_D
    # The sum is H + s w^T + w s^T, which needs no temporary matrix.
    w_D = (0.5 * (y_D @ Hy_D / sy + 1.0) * s_D - Hy_D) / sy
    largest = 2.0 * s_D.abs().max() * w_D.abs().max() + H_DD.aminmax().max.abs() + H_DD.aminmax().min.abs()
    if not (bool(sy > 0.0) and bool(largest.isfinite())):
        return False
    H_DD.addr_(s_D, w_D).addr_(w_D, s_D)
    return True


