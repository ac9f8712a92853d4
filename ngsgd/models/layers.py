"""Building blocks of acoustic models that torch does not have.

Letters: N rows, D dimension, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MIN_MEAN_SQUARE = 2.0**-66  # of the input relative to target_rms^2; Kaldi's floor


class PNorm(nn.Module):
    """y_j = (sum over group j of |x_i|^2)^(1/2): the p-norm nonlinearity with p = 2 (Zhang et al. 2014).

    Input (..., D), output (..., D / group); groups are consecutive.  The derivative is 0 where the output is 0.
    """

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        # vector_norm's derivative at 0 is 0, as in Kaldi
        norms: Tensor = torch.linalg.vector_norm(x.unflatten(-1, (-1, self.group)), dim=-1)
        return norms

    def extra_repr(self) -> str:
        return f"group={self.group}"


class Renormalize(nn.Module):
    """Scales each row to root mean square `target_rms`; keeps p-norm and ReLU activations from growing."""

    def __init__(self, target_rms: float = 1.0) -> None:
        super().__init__()
        self.target_rms = target_rms

    def forward(self, x_ND: Tensor) -> Tensor:
        mean_square = x_ND.square().mean(dim=-1, keepdim=True) / self.target_rms**2
        return x_ND * mean_square.clamp(min=_MIN_MEAN_SQUARE).rsqrt()

    def extra_repr(self) -> str:
        return f"target_rms={self.target_rms}"
