"""The log-likelihood that fMLLR maximizes, frame by frame from densities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def log_likelihood(w_DE: Tensor, x_TD: Tensor, means: Sequence[Tensor], variances: Sequence[Tensor],
                   posterior_TG: Tensor) -> Tensor:
    """Of y = A x + b under Gaussians with fixed posteriors, with the volume term log |det A|."""
    total = torch.zeros((), dtype=torch.float64)
    for x_D, posterior_G in zip(x_TD, posterior_TG, strict=True):
        y_D = w_DE[:, :-1] @ x_D + w_DE[:, -1]
        for mean_D, variance_D, posterior in zip(means, variances, posterior_G, strict=True):
            density = -0.5 * ((y_D - mean_D) ** 2 / variance_D + variance_D.log()
                              + math.log(2 * math.pi)).sum()
            total = total + posterior * density
        total = total + torch.linalg.slogdet(w_DE[:, :-1])[1]
    return total
