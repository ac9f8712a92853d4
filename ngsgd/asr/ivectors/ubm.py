"""The background model of i-vectors: G diagonal Gaussians, N frames, D features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ngsgd.asr.features import gaussians


@dataclass(frozen=True)
class DiagonalMixture:
    """Weights, means and variances, float64."""

    weight_G: Tensor
    mean_GD: Tensor
    variance_GD: Tensor

    def log_joint(self, x_ND: Tensor) -> Tensor:
        """N x G: log of weight times density of every frame under every Gaussian."""
        precision_GD = 1.0 / self.variance_GD
        square_GD = self.mean_GD.square() * precision_GD + self.variance_GD.log() + math.log(2.0 * math.pi)
        constant_G = self.weight_G.log() - 0.5 * square_GD.sum(dim=1)
        return constant_G + x_ND @ (self.mean_GD * precision_GD).T - 0.5 * x_ND.square() @ precision_GD.T

    def posteriors(self, x_ND: Tensor, *, num_gselect: int, min_post: float) -> Tensor:
        """N x G posteriors of the `num_gselect` most likely Gaussians, pruned below `min_post`."""
        best_NK, index_NK = self.log_joint(x_ND).topk(min(num_gselect, len(self.weight_G)), dim=1)
        post_NK = best_NK.softmax(dim=1)
        # the most likely one remains: its posterior is at least 1 / num_gselect
        post_NK = torch.where(post_NK < min_post, 0.0, post_NK)
        post_NK = post_NK / post_NK.sum(dim=1, keepdim=True)
        return torch.zeros(len(x_ND), len(self.weight_G), dtype=x_ND.dtype, device=x_ND.device).scatter_(1, index_NK, post_NK)


def train(x_ND: Tensor, num_gaussians: int) -> DiagonalMixture:
    """Train at most `num_gaussians`, as those of an HMM state, from one to enough frames each."""
    x_NK, pdf_N = x_ND.double().cpu().numpy(), np.zeros(len(x_ND), np.int32)
    found = gaussians.train(lambda: [(x_NK, pdf_N)], 1, num_gaussians=num_gaussians)
    arrays = np.exp(found.log_weight_G), found.mean_GD, found.variance_GD
    return DiagonalMixture(*(torch.from_numpy(array).to(x_ND.device) for array in arrays))
