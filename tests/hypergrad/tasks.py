"""A small classification task: drawn data, an MLP with dropout, losses weighted by class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.hypergrad import HyperparameterPlan, MinibatchIndex, ModuleTask

CLASSES, DIM, LAYERS = 4, 6, 3


def mlp(activation: type[nn.Module] = nn.Tanh, *, dropout: float = 0.1, width: int = 8,
        dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(DIM, width), activation(), nn.Dropout(dropout), nn.Linear(width, width), activation(),
                         nn.Linear(width, CLASSES)).to(dtype)


def weighted_loss(output: Tensor, batch: tuple[Tensor, ...], weights: Tensor | None) -> Tensor:
    """Data weights are one per class."""
    each = nn.functional.cross_entropy(output, batch[1], reduction="none")
    return (each if weights is None else each * weights.to(each.dtype)[batch[1]]).mean()


def task(module: nn.Module | None = None, *, size: int = 20, seed: int = 3) -> ModuleTask:
    module = module or mlp()
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(CLASSES, DIM, generator=generator, dtype=torch.float64)
    y_N = torch.randint(0, CLASSES, (300,), generator=generator)
    x_ND = (means[y_N] + 0.8 * torch.randn(300, DIM, generator=generator, dtype=torch.float64)).to(dtype)

    def batch(place: MinibatchIndex) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.random.default_rng([seed, *place]).integers(0, 200, size))
        return x_ND[rows], y_N[rows]
    return ModuleTask(module, batch, weighted_loss, [(x_ND[200:], y_N[200:])], seed)


def plan(num_steps: int = 12, *, jobs: int = 1, iters: int = 1, limits: bool = False,
         weights: bool = True, **changes: Any) -> HyperparameterPlan:
    """Everything differs from step to step and from layer to layer."""
    generator = torch.Generator().manual_seed(7)

    def drawn(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
    settings = {
        "lr_TG": drawn(0.2, 0.6, num_steps, LAYERS), "momentum_TG": drawn(0.5, 0.95, num_steps, LAYERS),
        "l2_G": drawn(0.001, 0.01, LAYERS),
        "init_scale_G": drawn(0.8, 1.2, LAYERS),
        "max_change_G": torch.full((LAYERS,), 0.05 if limits else 0.0, dtype=torch.float64),
        "max_param_change": torch.tensor(0.07 if limits else 0.0, dtype=torch.float64),
        "averaging_ON": drawn(0.5, 1.5, iters, jobs),
        "data_weights": drawn(0.5, 1.5, CLASSES) if weights else None, **changes}
    return HyperparameterPlan(**settings)
