"""Orthogonalization of matrices by Newton-Schulz iterations.

Source: Jordan et al. 2024 (Muon).

Letters: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngsgd.ops.tensors import require_real

# Coefficients of Muon's fifth-order polynomial. It maps singular values to between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalized(u_OI: Tensor, num_steps: int = 5) -> Tensor:
    """Move the singular values to about 1 by Newton-Schulz iterations, in bfloat16 on a GPU."""
    require_real(u_OI, "u_OI", "orthogonalized", ndim=2)
    x = u_OI.bfloat16() if u_OI.is_cuda else u_OI.float()
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    is_tall = len(x) > x.shape[1]
    if is_tall:
        x = x.T
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.T if is_tall else x).to(u_OI.dtype)
