"""Activation checkpointing changes no direction, or is refused (`use_reentrant=True`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS
from tests.preconditioners.problems import close

D = 4
CE = nn.functional.cross_entropy


class _Block(nn.Module):
    """Attention or an LSTM, which are computed from their products while rows are recorded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(D), nn.Linear(D, D), nn.Dropout(0.2)
        self.inner: nn.Module = (nn.LSTM(D, D, batch_first=True) if kind == "lstm"
                                 else nn.MultiheadAttention(D, 2, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.inner(h)[0] if isinstance(self.inner, nn.LSTM) else self.inner(h, h, h)[0]
        y: Tensor = x + self.drop(self.linear(h).tanh())
        return y


class _Net(nn.Module):
    """Blocks under a checkpoint, the last of which runs twice."""

    def __init__(self, kind: str, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = nn.Linear(3, D), nn.Linear(D, 3)
        self.blocks, self.reentrant = nn.ModuleList([_Block(kind), _Block(kind)]), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for block in (*self.blocks, self.blocks[1]):
            h = (block(h) if self.reentrant is None
                 else checkpoint(block, h, use_reentrant=self.reentrant))
        f: Tensor = self.out(h).mean(dim=1)
        return f


def _directions(kind: str, block: str, reentrant: bool | None, *, at_once: bool = False,
                **options: Any) -> list[Tensor]:
    """Of two steps."""
    model = _Net(block, reentrant).double()
    preconditioner = METHODS[kind](model, damping=0.1, **options)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        x, y = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64), torch.arange(4) % 3
        model.zero_grad()
        if at_once:
            preconditioner.evaluate_and_step(lambda x=x, y=y: CE(model(x), y), lr=0.01)
        else:
            preconditioner.evaluate(lambda x=x, y=y: CE(model(x), y))
            preconditioner.step(lr=0.01)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    return found


@pytest.mark.entry(
    "B17", "you use activation checkpointing with a preconditioner or with `collect`", "works",
    "with `use_reentrant=False` directions and quantities are those without checkpointing; with "
    "`use_reentrant=True` methods that see gradients alone work, and the others raise ConfigError")
@pytest.mark.parametrize("block", ["attention", "lstm"])
# KFRA refuses branches
@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind != "kfra"])
def test_the_direction_is_that_without_checkpointing(kind: str, block: str) -> None:
    for one, other in zip(_directions(kind, block, None), _directions(kind, block, False),
                          strict=True):
        close(other, one)


@pytest.mark.entry("B17")
@pytest.mark.parametrize("options", [{"fisher": "exact"}, {"fisher": "mc", "num_draws": 2},
                                     {"at_once": True}, {"at_once": True, "curvature_interval": 2}])
def test_so_is_it_with_other_fishers_and_in_one_call(options: dict[str, Any]) -> None:
    for one, other in zip(_directions("kfac", "attention", None, **options),
                          _directions("kfac", "attention", False, **options), strict=True):
        close(other, one)


@pytest.mark.entry("B17")
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_vectors_of_the_loss_are_not_sent_through_reentrant_checkpoints(fisher: str) -> None:
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        _directions("kfac", "attention", True, fisher=fisher)


@pytest.mark.entry("B17")
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_reentrant_checkpoint_around_the_model_is_refused(fisher: str) -> None:
    model = _Net("attention", None)
    preconditioner = METHODS["kfac"](model, fisher=fisher)
    x, y = torch.randn(4, 2, 3, requires_grad=True), torch.arange(4) % 3
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        preconditioner.evaluate(lambda: CE(checkpoint(model, x, use_reentrant=True), y))
    preconditioner = METHODS["kfac"](model, fisher=fisher)
    preconditioner.evaluate(lambda: CE(checkpoint(model, x, use_reentrant=False), y))
    preconditioner.step(lr=0.01)
