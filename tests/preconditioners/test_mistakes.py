"""Mistakes with preconditioners: models without parameters, closures, watch(), values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError, NgsgdWarning
from ngsgd.preconditioners import KFAC, METHODS, GradientMaker
from tests.preconditioners.support import SEES_ROWS

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    return nn.functional.cross_entropy(model(x), Y)


@pytest.mark.parametrize("made", [*METHODS.values(), GradientMaker])
def test_a_model_without_parameters_is_refused(made: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ConfigError):
        made(nn.ReLU())


@pytest.mark.parametrize("method", METHODS)
def test_a_closure_that_calls_backward_is_refused(method: str) -> None:
    model = network()

    def closure() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss
    with pytest.raises(ConfigError, match="closure"):
        METHODS[method](model).evaluate(closure)


@pytest.mark.parametrize("returned", [lambda loss: None, lambda loss: loss.item(), lambda loss: loss.detach(),
                                      lambda loss: loss.expand(2)])
@pytest.mark.parametrize("method", ["kfac", "adam"])
def test_a_closure_without_a_loss_is_refused(method: str, returned: Callable[[Tensor], Any]) -> None:
    model = network()
    with pytest.raises(ConfigError, match="closure"):
        METHODS[method](model).evaluate(lambda: returned(loss_of(model)))


def test_other_errors_of_a_backward_pass_are_not_changed() -> None:
    model = network()

    def fails(gradient: Tensor) -> None:
        raise RuntimeError("hook")

    def closure() -> Tensor:
        loss = loss_of(model)
        loss.register_hook(fails)
        return loss
    with pytest.raises(RuntimeError, match="hook"):
        KFAC(model).evaluate(closure)


# KFRA takes no num_rows
@pytest.mark.parametrize(("method", "num_rows"), [(method, num_rows) for method in SEES_ROWS for num_rows in (None, len(X))
                                                  if not (num_rows and method == "kfra")])
def test_a_backward_pass_after_watch_is_refused(method: str, num_rows: int | None) -> None:
    model = network()
    preconditioner = METHODS[method](model)
    with pytest.raises(ConfigError, match=r"backward\(loss\)"), preconditioner.watch(num_rows):
        loss_of(model)


@pytest.mark.parametrize("method", METHODS)
def test_a_minibatch_that_is_not_finite_counts_once(method: str) -> None:
    model = network()
    preconditioner = METHODS[method](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(14):
            model.zero_grad()
            x = X if step in (0, 6, 13) else X * float("nan")
            preconditioner.evaluate(lambda x=x: loss_of(model, x))
            preconditioner.step(lr=0.01)
    assert preconditioner.num_skipped == 11
    # at the first one, and at the tenth
    assert len(caught) == 2
    assert all(warning.category is NgsgdWarning and warning.filename == __file__ for warning in caught)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
