"""The optimiser in a plain loop: beside torch's and this package's SGD, and back again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ReversalError
from ngsgd.hypergrad import ReversibleSGD
from ngsgd.optim import SGD

X_ND = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y_N = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(1))


def network(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 4)).to(dtype)


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Callable[[], Tensor]:
    def evaluate() -> Tensor:
        torch.manual_seed(step)
        rows = slice(16 * (step % 4), 16 * (step % 4) + 16)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X_ND[rows].to(next(model.parameters()).dtype)), Y_N[rows])
        loss.backward()
        return loss
    return evaluate


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("nesterov", [False, True])
def test_trajectory_equals_torch_sgd(nesterov: bool) -> None:
    ours, theirs = network(), network()
    one = ReversibleSGD(ours, 0.5, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    # torch's velocity takes the whole gradient, ours a share of 1 - momentum
    other = torch.optim.SGD(theirs.parameters(), 0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    for step in range(100):
        one.step(closure(ours, one, step))
        other.step(closure(theirs, other, step))
    assert float((vector(ours) - vector(theirs)).abs().max()) < 1e-10


def test_trajectory_equals_our_sgd_with_limits() -> None:
    ours, theirs = network(), network()
    one = ReversibleSGD(ours, 0.5, momentum=0.8, max_change=0.05, max_param_change=0.06, weight_decay=0.02)
    other = SGD(theirs, 0.5, momentum=0.8, max_change=0.05, max_param_change=0.06, weight_decay=0.01)  # of |w|^2, not half of it
    for step in range(60):
        one.step(closure(ours, one, step))
        closure(theirs, other, step)()
        other.step(num_samples=1)
    assert other.activity().model_share > 0.1
    assert float((vector(ours) - vector(theirs)).abs().max()) < 1e-9


CASES: list[dict[str, Any]] = [
    {}, {"momentum": 0.0}, {"weight_decay": 0.02, "max_change": 0.02, "max_param_change": 0.03}, {"nesterov": True},
    {"nesterov": True, "weight_decay": 0.02, "max_param_change": 0.05},
    {"layer_options": {"3": {"lr": 0.1, "momentum": 0.5}, "0": {"max_change": 0.01}}}]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_undo_gives_every_bit_back(settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = network(dtype, dropout=0.2)
    optimizer = ReversibleSGD(model, 0.3, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    states = []
    for step in range(40):
        states.append(vector(model).clone())
        optimizer.step(closure(model, optimizer, step))
        schedule.step()
    for step in reversed(range(40)):
        optimizer.undo(closure(model, optimizer, step))
        assert torch.equal(vector(model), states[step])
    assert optimizer.exact.spill_bytes == 0
    with pytest.raises(ReversalError, match="no step has been taken"):
        optimizer.undo(closure(model, optimizer, 0))


def test_another_minibatch_is_reported_with_its_step() -> None:
    model = network()
    optimizer = ReversibleSGD(model, 0.3)
    for step in range(6):
        optimizer.step(closure(model, optimizer, step))
    optimizer.undo(closure(model, optimizer, 5))
    with pytest.raises(ReversalError, match=r"^step 5 could not be undone") as caught:
        optimizer.undo(closure(model, optimizer, 3))
    assert caught.value.step == 5


def test_a_saved_optimizer_goes_on_and_back() -> None:
    model, other = network(), network()
    optimizer, loaded = ReversibleSGD(model, 0.3), ReversibleSGD(other, 0.1)
    start = vector(model).clone()
    for step in range(70):
        optimizer.step(closure(model, optimizer, step))
    loaded.load_state_dict(optimizer.state_dict())
    assert torch.equal(vector(other), vector(model))
    for step in reversed(range(70)):
        loaded.undo(closure(other, loaded, step))
    assert torch.equal(vector(other), start)
