"""Linear algebra of preconditioners: inverses, roots and solutions that survive float32.

What float32 cannot see through is done again in float64; what is not finite even then raises DivergenceError.

Letters: D dimension, N rows (samples), X any number of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngsgd.errors import DivergenceError


def damped_inverse(factor_DD: Tensor, damping: float) -> Tensor:
    """(factor + damping I)^-1 of a symmetric positive semidefinite matrix, by Cholesky.

    >>> damped_inverse(torch.tensor([[3.0]]), 1.0)
    tensor([[0.2500]])
    """
    return torch.cholesky_inverse(damped_cholesky(factor_DD, damping)).to(factor_DD.dtype)


def damped_cholesky(factor_DD: Tensor, damping: float) -> Tensor:
    """The lower root of factor + damping I; float64 where float32 does not see that it is positive definite."""
    for dtype in (factor_DD.dtype, torch.float64):
        damped_DD = factor_DD.to(dtype, copy=True)
        damped_DD.diagonal(dim1=-2, dim2=-1).add_(damping)
        root_DD, failure = torch.linalg.cholesky_ex(damped_DD)
        if not bool(failure.any()):
            found: Tensor = root_DD
            return found
    raise DivergenceError(f"a curvature factor of dimension {factor_DD.shape[-1]} with damping {damping:g} is not positive "
                          "definite; the loss may have left the finite numbers: lower the learning rate or raise the damping.")


def damped_solve(factor_DD: Tensor, damping: float, right_DX: Tensor) -> Tensor:
    """(factor + damping I)^-1 right."""
    root_DD = damped_cholesky(factor_DD, damping)
    return torch.cholesky_solve(right_DX.to(root_DD.dtype), root_DD).to(right_DX.dtype)


def eigh(factor_DD: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues in rising order, eigenvectors as columns); in float64 where float32 does not converge."""
    for dtype in (factor_DD.dtype, torch.float64):
        try:
            values_D, vectors_DD = torch.linalg.eigh(factor_DD.to(dtype))
        except RuntimeError:
            continue
        if bool(values_D.isfinite().all()):
            return values_D.to(factor_DD.dtype), vectors_DD.to(factor_DD.dtype)
    raise DivergenceError(f"the eigenvalues of a curvature factor of dimension {len(factor_DD)} cannot be found; the gradients may "
                          "have left the finite numbers: lower the learning rate.")


def inverse_root(factor_DD: Tensor, root: int, ridge: float) -> Tensor:
    """(factor + ridge lmax I)^(-1/root) by eigenvalues, which rounding may have made negative: those count as 0."""
    values_D, U_DD = eigh(factor_DD)
    values_D = values_D.clamp(min=0.0)
    damped_D = values_D + ridge * values_D[-1].clamp(min=torch.finfo(values_D.dtype).tiny)
    return (U_DD * damped_D.pow(-1.0 / root)) @ U_DD.T


def inverse_root_newton(factor_DD: Tensor, root: int, ridge: float, *, tolerance: float = 1e-6, max_steps: int = 100) -> Tensor:
    """The same by the coupled Newton iteration (Guo and Higham 2006): products only, once more in float64 if it does not converge.

    Raises DivergenceError if float64 does not converge either.
    """
    for dtype in (factor_DD.dtype, torch.float64):
        A_DD = factor_DD.to(dtype, copy=True)
        A_DD.diagonal().add_(ridge * largest_eigenvalue(A_DD))
        found = _newton(A_DD, root, tolerance, max_steps)
        if found is not None:
            return found.to(factor_DD.dtype)
    raise DivergenceError(f"Newton's iteration for the inverse root {root} of a factor of dimension {len(factor_DD)} does not "
                          "converge; choose root_method=\"eigen\" or a larger ridge.")


def _newton(A_DD: Tensor, root: int, tolerance: float, max_steps: int) -> Tensor | None:
    identity_DD = torch.eye(len(A_DD), dtype=A_DD.dtype, device=A_DD.device)
    z = (1.0 + root) / (2.0 * torch.linalg.matrix_norm(A_DD))
    M_DD, H_DD = A_DD * z, identity_DD * z ** (1.0 / root)
    for _ in range(max_steps):
        error = (M_DD - identity_DD).abs().max()
        if bool(error <= tolerance):
            found: Tensor = H_DD
            return found
        if not bool(error.isfinite()):
            return None
        T_DD = ((root + 1.0) * identity_DD - M_DD) / root
        M_DD = torch.linalg.matrix_power(T_DD, root) @ M_DD
        H_DD = H_DD @ T_DD
    return None


def largest_eigenvalue(A_DD: Tensor, *, tolerance: float = 1e-7, max_steps: int = 200) -> Tensor:
    """Of a symmetric positive semidefinite matrix, by power iteration from a vector that no symmetry of A can be orthogonal to."""
    v_D = torch.linspace(1.0, 2.0, len(A_DD), dtype=A_DD.dtype, device=A_DD.device).sin_()
    v_D /= v_D.norm()
    value = v_D.new_zeros(())
    for _ in range(max_steps):
        w_D = A_DD @ v_D
        last, value = value, w_D.norm()
        if not bool(value > 0.0) or bool((value - last).abs() <= tolerance * value):
            break
        v_D = w_D / value
    return value


def woodbury_solve(U_ND: Tensor, damping: float, right_DX: Tensor) -> Tensor:
    """(U^T U + damping I)^-1 right, through the N x N Gram matrix: cheap where N < D."""
    inner_NX = damped_solve(U_ND @ U_ND.T, damping, U_ND @ right_DX)
    return (right_DX - U_ND.T @ inner_NX) / damping
