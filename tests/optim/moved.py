"""Training with a check that it changed the model, for tests that a constant would pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def moving(model: nn.Module) -> Iterator[None]:
    """Assert that most matrices of the model change inside, in most of their numbers."""
    before = [p.detach().clone() for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    yield
    after = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    moved = [float((p != old).double().mean()) > 0.5 for p, old in zip(after, before, strict=True)]
    assert sum(moved) > 0.5 * len(moved) or not moved


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range,
          loss_of: Callable[[nn.Module, int], Tensor]) -> None:
    """A step on the minibatch of each seed, in which the model moves."""
    with moving(model):
        for seed in seeds:
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.step()


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
