"""The background model, by EM with mixing up: G diagonal Gaussians, N frames, D features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

VARIANCE_FLOOR = 0.01  # minimum variance, relative to the variance of all frames
# a Gaussian with fewer frames is removed, and the heaviest one is split
FEWEST_FRAMES = 10.0
# distance of the means of the halves of a Gaussian, in standard deviations
PERTURBATION = 0.1
ITERS_PER_SIZE = 3  # passes of EM between two doublings of the mixture
ITERS_AT_END = 8  # passes at the final size
_FRAMES_AT_ONCE = 8192  # bounds memory: frames x Gaussians


@dataclass(frozen=True)
class DiagonalMixture:
    """Weights, means and variances, float64."""

    weight_G: Tensor
    mean_GD: Tensor
    variance_GD: Tensor

    @property
    def num_gaussians(self) -> int:
        return len(self.weight_G)

    def log_joint(self, x_ND: Tensor) -> Tensor:
        """N x G: log of weight times density of every frame under every Gaussian."""
        precision_GD = 1.0 / self.variance_GD
        square_GD = self.mean_GD.square() * precision_GD + self.variance_GD.log() + math.log(2.0 * math.pi)
        constant_G = self.weight_G.log() - 0.5 * square_GD.sum(dim=1)
        return constant_G + x_ND @ (self.mean_GD * precision_GD).T - 0.5 * x_ND.square() @ precision_GD.T

    def posteriors(self, x_ND: Tensor, *, num_gselect: int, min_post: float) -> Tensor:
        """N x G posteriors of the `num_gselect` most likely Gaussians, pruned below `min_post`."""
        best_NK, index_NK = self.log_joint(x_ND).topk(min(num_gselect, self.num_gaussians), dim=1)
        post_NK = best_NK.softmax(dim=1)
        # the most likely one remains: its posterior is at least 1 / num_gselect
        post_NK = torch.where(post_NK < min_post, 0.0, post_NK)
        post_NK = post_NK / post_NK.sum(dim=1, keepdim=True)
        return torch.zeros(len(x_ND), self.num_gaussians, dtype=x_ND.dtype, device=x_ND.device).scatter_(1, index_NK, post_NK)


def train(x_ND: Tensor, num_gaussians: int, *, seed: int = 0) -> DiagonalMixture:
    """Train at most `num_gaussians`, from one by doubling; EM keeps those with enough frames."""
    x_ND = x_ND.double()
    generator = torch.Generator().manual_seed(seed)
    mean_D, variance_D = x_ND.mean(dim=0), x_ND.var(dim=0, correction=0).clamp(min=1e-10)
    mixture = DiagonalMixture(torch.ones(1, dtype=x_ND.dtype, device=x_ND.device), mean_D[None], variance_D[None])
    size, last = 1, min(num_gaussians, max(1, int(len(x_ND) / FEWEST_FRAMES)))
    while size < last:
        size = min(2 * size, last)
        mixture = split(mixture, size, generator)
        for _ in range(ITERS_PER_SIZE):
            mixture, _ = em_pass(mixture, x_ND, VARIANCE_FLOOR * variance_D)
            mixture = split(mixture, size, generator)
    for _ in range(ITERS_AT_END):
        mixture, _ = em_pass(mixture, x_ND, VARIANCE_FLOOR * variance_D)
    return mixture


def em_pass(mixture: DiagonalMixture, x_ND: Tensor, floor_D: Tensor) -> tuple[DiagonalMixture, float]:
    """Return the mixture after a pass of EM, and the log-likelihood per frame before the pass."""
    count_G = torch.zeros_like(mixture.weight_G)
    sum_GD, square_GD = torch.zeros_like(mixture.mean_GD), torch.zeros_like(mixture.mean_GD)
    log_likelihood = 0.0
    for part_ND in x_ND.split(_FRAMES_AT_ONCE):
        joint_NG = mixture.log_joint(part_ND)
        total_N1 = joint_NG.logsumexp(dim=1, keepdim=True)
        post_NG = (joint_NG - total_N1).exp()
        count_G += post_NG.sum(dim=0)
        sum_GD += post_NG.T @ part_ND
        square_GD += post_NG.T @ part_ND.square()
        log_likelihood += float(total_N1.sum())
    kept = count_G >= min(FEWEST_FRAMES, float(count_G.max()))
    count_G1 = count_G[kept, None]
    mean_GD = sum_GD[kept] / count_G1
    variance_GD = (square_GD[kept] / count_G1 - mean_GD.square()).maximum(floor_D)
    return DiagonalMixture(count_G[kept] / count_G1.sum(), mean_GD, variance_GD), log_likelihood / len(x_ND)


def split(mixture: DiagonalMixture, size: int, generator: torch.Generator) -> DiagonalMixture:
    """Split the heaviest Gaussians, into halves with slightly other means, up to `size`."""
    while (missing := size - mixture.num_gaussians) > 0:
        _, heaviest = mixture.weight_G.topk(min(missing, mixture.num_gaussians))
        variance_GD = mixture.variance_GD[heaviest]
        noise_GD = torch.randn(variance_GD.shape, generator=generator, dtype=variance_GD.dtype).to(variance_GD.device)
        apart_GD = PERTURBATION * noise_GD * variance_GD.sqrt()
        weight_G, mean_GD = mixture.weight_G.clone(), mixture.mean_GD.clone()
        weight_G[heaviest] *= 0.5
        mean_GD[heaviest] -= apart_GD
        mixture = DiagonalMixture(torch.cat([weight_G, weight_G[heaviest]]),
                                  torch.cat([mean_GD, mixture.mean_GD[heaviest] + apart_GD]),
                                  torch.cat([mixture.variance_GD, variance_GD]))
    return mixture
