"""Eden and Eden2 against the formula, in the loops of icefall and of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ngsgd.errors import ConfigError, OptimizerStateError
from ngsgd.optim import NGSGD, Eden, Eden2
from tests.reference.scaled_adam import eden


def _optimizer(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.045,)])


@pytest.mark.parametrize(("batch", "epoch", "wanted"), [
    # 1/2 of the base at the start of the warm-up, 3/4 in the middle
    (0, 0, 0.5), (250, 0, 0.75 * (1.0 + (250 / 7500) ** 2) ** -0.25),
    # 2^(-1/4) where one of the two counts reaches its scale, and 2^(-1/2) where both do
    (7500, 0, 0.8408964152537145), (500_000_000, 0, (7500 / 500_000_000) ** 0.5), (7500, 3.5, 0.7071067811865476)])
def test_values_computed_by_hand(batch: int, epoch: float, wanted: float) -> None:
    optimizer = _optimizer(0.04, 1.0)
    scheduler = Eden(optimizer)
    scheduler.step_batch(batch)
    scheduler.step_epoch(epoch)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.04 * wanted, wanted], rel=1e-8)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("batch", "wanted"), [(500, 0.2), (100, 0.42426406871192845), (0, 0.5)])
def test_eden2_depends_on_batches_only(batch: int, wanted: float) -> None:
    """At 500 batches (b / B)^2 is 24, so the factor is 25^(-1/2); at 100 it is 0.6 2^(-1/2)."""
    optimizer = _optimizer(1.0)
    scheduler = Eden2(optimizer, lr_batches=500.0 / 24.0 ** 0.5 if batch == 500 else 100.0)
    scheduler.step_batch(batch)
    scheduler.step_epoch(7)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted)


def test_a_loop_of_icefall_sets_the_rates_of_the_formula() -> None:
    optimizer = _optimizer()
    scheduler = Eden(optimizer, lr_batches=20.0, lr_epochs=1.5, warmup_batches=4, warmup_start=0.1)
    batch = 0
    for epoch in range(3):
        scheduler.step_epoch(epoch)
        for _ in range(10):
            w = min(1.0, 0.1 + 0.9 * batch / 4)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(w * eden(0.045, batch, epoch, 20.0, 1.5), rel=1e-12)
            optimizer.step()
            batch += 1
            scheduler.step_batch()
    scheduler.step_epoch()
    assert (scheduler.batch, scheduler.epoch) == (30, 3.0)


def test_a_loaded_state_continues() -> None:
    optimizer = _optimizer()
    scheduler = Eden(optimizer, 5.0)
    for _ in range(7):
        optimizer.step()
        scheduler.step()
    scheduler.step_epoch(2)
    state = copy.deepcopy(scheduler.state_dict()), copy.deepcopy(optimizer.state_dict())
    other_optimizer = _optimizer(0.1)
    other = Eden(other_optimizer)
    other_optimizer.load_state_dict(state[1])
    other.load_state_dict(state[0])
    for one in (optimizer, other_optimizer):
        one.step()
    scheduler.step_batch()
    other.step_batch()
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_rates_in_tensors_stay_in_their_tensors() -> None:
    rate = torch.tensor(0.045)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = Eden(optimizer, warmup_batches=0)
    scheduler.step_batch(7500)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.045 * 2.0 ** -0.25)


def test_it_sets_the_rates_of_ngsgd() -> None:
    optimizer = NGSGD(nn.Linear(2, 2), lr=0.02)
    Eden(optimizer).step_batch(250)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.75 * eden(0.02, 250, 0, 7500.0, 3.5))


@pytest.mark.parametrize("wrong", [{"lr_batches": 0.0}, {"lr_epochs": -1.0}, {"warmup_batches": -1.0}, {"warmup_start": 1.5}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Eden(_optimizer(), **wrong)


@pytest.mark.entry("F18")
@pytest.mark.parametrize("kind", [Eden, Eden2])
def test_a_state_of_another_schedule_is_refused(kind: type[Eden]) -> None:
    def made(num_groups: int = 1, kind: type[Eden] = kind) -> Eden:
        schedule = kind(torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)], lr=0.1))
        for _ in range(3):
            schedule.optimizer.step()
            schedule.step_batch()
        return schedule

    schedule = made()
    state, before = schedule.state_dict(), schedule.get_last_lr()
    step = torch.optim.lr_scheduler.StepLR(schedule.optimizer, 2)
    others: list[Any] = [None, [], "state", {}, step.state_dict(), made(2).state_dict(),
                         made(kind=Eden2 if kind is Eden else Eden).state_dict(), {**state, "more": 1}]
    for key, value in state.items():
        others.append({name: each for name, each in state.items() if name != key})
        if not isinstance(value, bool):
            wrong: list[Any] = [None, {}, float("nan"), "text"]
            others += [{**state, key: other} for other in wrong if value is not None]
    for other in others:
        with pytest.raises(OptimizerStateError):
            schedule.load_state_dict(other)
        assert schedule.state_dict() == state
    fresh = kind(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    assert fresh.get_last_lr() != before
    fresh.load_state_dict(state)
    fresh.optimizer.step()
    fresh.step_batch()
    schedule.step_batch()
    assert fresh.get_last_lr() == schedule.get_last_lr()
