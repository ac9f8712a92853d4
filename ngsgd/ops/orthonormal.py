"""Semi-orthogonal matrices: the constraint of Kaldi's factored layers (Povey et al. 2018, "Semi-orthogonal low-rank matrix
factorization for deep neural networks", section 2; nnet3/nnet-utils.cc, ConstrainOrthonormal).

Letters: M the matrix, rows x columns with rows <= columns; P = M M^T; s the scale that its singular values are pulled to.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 1/8: converges quadratically near the constraint
_UPDATE_SPEED = 0.125
# a floating scale is only good where the singular values are close together: go slower where they
# are not
# ratio tr(P P^T) rows / tr(P)^2, 1 for equal singular values
_WIDE, _VERY_WIDE = 1.02, 1.1


def constrain_orthonormal(weight: Tensor, scale: float) -> None:
    """Moves the rows of `weight` (its columns, if they are fewer) one step towards orthogonality, in place.

    `scale` > 0 is the singular value wanted; < 0 lets it float, so that the constraint does not fix the size (their section
    2.3).  Dimensions behind the first are taken together.  A weight of zeros stays, and so does one that is not finite.
    """
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
    # tensors decide, not Python: the device need not be waited for
    M.add_(torch.where(torch.isfinite(change).all(), change, 0.0).to(M.dtype))
