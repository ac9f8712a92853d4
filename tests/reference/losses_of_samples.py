"""Curvature from one scalar loss for each sample: only autograd, in float64.

For loops in which a sample is not simply an index of one output: several calls of a model, several
losses of one output.

Letters: N samples, F outputs of a sample, P elements of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def gradients(model: nn.Module, losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """N x P of every parameter: the gradient of each sample's loss."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for name, p, g in zip(names, parameters, found, strict=True):
            rows[name].append(torch.zeros_like(p).flatten() if g is None else g.flatten())
    return {name: torch.stack(g) for name, g in rows.items()}


def ggn(model: nn.Module, output: Callable[[int], Tensor], loss: Callable[[int, Tensor], Tensor],
        num_samples: int) -> dict[str, Tensor]:
    """N x P x P of every parameter: J^T H J of each sample, from its outputs and its loss as a
    function of them.
    """
    blocks: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for n in range(num_samples):
        f_F = output(n).flatten()
        J = gradients(model, list(f_F))
        H_FF = torch.autograd.functional.hessian(lambda f, n=n: loss(n, f), f_F.detach())
        for name, J_FP in J.items():
            blocks[name].append(J_FP.T @ H_FF @ J_FP)
    return {name: torch.stack(each) for name, each in blocks.items()}
