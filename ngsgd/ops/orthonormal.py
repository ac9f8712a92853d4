"""Semi-orthogonal constraint of Kaldi's factored layers, and Muon's orthogonalization.

Sources: Povey et al. 2018, "Semi-orthogonal low-rank matrix factorization for deep neural
networks", section 2; nnet3/nnet-utils.cc, ConstrainOrthonormal. Jordan et al. 2024 (Muon).

Letters: O outputs, I inputs; M the matrix, rows x columns with rows <= columns; P = M M^T; s the
target of its singular values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngsgd.ops.tensors import require_real

# 1/8: converges quadratically near the constraint
_UPDATE_SPEED = 0.125
# A free scale needs similar singular values; otherwise take smaller steps.
# The ratio tr(P P^T) rows / tr(P)^2 is 1 for equal singular values.
_WIDE, _VERY_WIDE = 1.02, 1.1
# Coefficients of Muon's fifth-order polynomial. It maps singular values to between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def constrain_orthonormal(weight: Tensor, scale: float) -> None:
    """Move the rows of `weight` (or its columns, if fewer) one step towards orthogonality, in
    place.

    Args:
        weight: dimensions after the first are flattened. Zero and non-finite weights are unchanged.
        scale: > 0 is the target of the singular values; < 0 a free scale, which does not constrain
            the norm (section 2.3).
    """
    require_real(weight, "weight", "constrain_orthonormal")
    M = weight.view(len(weight), -1)
    if M.shape[0] > M.shape[1]:
        M = M.T
    wide = M.to(torch.promote_types(M.dtype, torch.float32))
    P = wide @ wide.T
    trace_P = P.diagonal().sum()
    trace_PP = P.square().sum()
    speed = torch.full_like(trace_P, _UPDATE_SPEED)
    scale_sq = torch.full_like(trace_P, scale**2)
    if scale < 0.0:
        scale_sq = trace_PP / trace_P
        ratio = trace_PP * len(P) / trace_P.square()
        speed = torch.where(ratio > _VERY_WIDE, speed / 4.0, torch.where(ratio > _WIDE, speed / 2.0, speed))
    P.diagonal().sub_(scale_sq)
    change = (P @ wide) * (-4.0 * speed / scale_sq)
    # A tensor condition avoids a device synchronization.
    M.add_(torch.where(torch.isfinite(change).all(), change, 0.0).to(M.dtype))


def orthogonalized(u_OI: Tensor, num_steps: int = 5) -> Tensor:
    """Move the singular values to about 1 by Newton-Schulz iterations, in bfloat16 on a GPU."""
    require_real(u_OI, "u_OI", "orthogonalized", ndim=2)
    x = u_OI.bfloat16() if u_OI.is_cuda else u_OI.float()
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    if is_tall := len(x) > x.shape[1]:
        x = x.T
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.T if is_tall else x).to(u_OI.dtype)
