"""Damped curvature update of BackPACK's experiments:

    theta <- theta - lr (G(theta) + (damping + l2) I)^-1 (gradient + l2 theta)

The curvature G is a diagonal or a Kronecker product. The latter is damped factor by factor as in
Martens and Grosse (2015):

    (B (x) A + d I)^-1  ~  (B + sqrt(d) / pi I)^-1 (x) (A + pi sqrt(d) I)^-1
    pi^2 = (tr A / dim A) / (tr B / dim B)

Source: arXiv 1912.10985, equations 27 to 29. Letters: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngsgd.curvature.forms.kronecker import Kronecker
from ngsgd.ops.linalg import damped_cholesky, shared_damping


def damped_direction(gradient: Tensor, parameter: Tensor, curvature: Tensor | Kronecker, *, damping: float,
                     l2: float = 0.0) -> Tensor:
    """Return (G + (damping + l2) I)^-1 (gradient + l2 parameter); a step subtracts it.

    Args:
        gradient: of the parameter.
        parameter: theta.
        curvature: diagonal of G in the shape of the parameter, or its Kronecker factors.
        damping: > 0, typically 1e-4 to 1.
        l2: >= 0; l2 / 2 |theta|^2 is added to the loss.

    Raises:
        ValueError: damping + l2 is not positive.
        DivergenceError: a factor is not finite, or not positive definite in spite of its damping.

    Example:
        >>> damped_direction(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([3.0]), damping=1.0)
        tensor([0.5000])
    """
    total = damping + l2
    if not (damping >= 0.0 and l2 >= 0.0 and total > 0.0):
        raise ValueError(f"damping is {damping} and l2 is {l2}; both must be at least 0 and one of "
                         "them positive")
    right = gradient if l2 == 0.0 else gradient + l2 * parameter
    if isinstance(curvature, Tensor):
        return right / (curvature + total)
    if curvature.A_II is None:
        return _solved(curvature.B_OO, total, right.reshape(len(curvature.B_OO), -1)).view_as(right)
    of_B, of_A = shared_damping(curvature.B_OO, curvature.A_II, total)
    half_OI = _solved(curvature.B_OO, of_B, right.reshape(len(curvature.B_OO), -1))
    return _solved(curvature.A_II, of_A, half_OI.T).T.reshape(right.shape)


def _solved(factor_DD: Tensor, damping: float, right_DX: Tensor) -> Tensor:
    """Return (factor + damping I)^-1 right."""
    root_DD = damped_cholesky(factor_DD, damping)
    return torch.cholesky_solve(right_DX.to(root_DD.dtype), root_DD).to(right_DX.dtype)
