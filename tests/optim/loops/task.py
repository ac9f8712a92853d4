"""The network and the minibatches of these loops, and the loop itself in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.optim import SGD

NUM_IN, NUM_CLASSES, SIZE = 10, 3, 16


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(NUM_IN, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, NUM_CLASSES))


def rows(num_minibatches: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(SIZE * num_minibatches, NUM_IN, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def minibatches(num: int = 8) -> list[tuple[Tensor, Tensor]]:
    x, y = rows(num)
    return list(zip(x.split(SIZE), y.split(SIZE), strict=True))


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def made(kind: type[SGD | NGSGD], model: nn.Module, lr: float, **options: Any) -> Any:
    """An optimizer for the mean loss below, whose rate is that of a sum."""
    given: dict[str, Any] = {"loss_reduction": "sum"} if kind is NGSGD else {}
    return kind(model, lr, **given, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = mean_loss(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    """Bitwise identical, and not the start."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(ours.parameters()), next(network().parameters()))
