"""Gradient penalties and second derivatives through layers with natural gradient are plain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, NaturalMuon
from ngsgd.errors import ConfigError


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), data(6, 5)),
    "frames": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(20, 1)), data(6, 2, 5)),
    "images": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1)), data(6, 2, 5, 5)),
    "norms": (lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)), data(6, 5)),
    "batch": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1)),
              data(6, 2, 5, 5)),
    "groups": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.RMSNorm(12),
                                     nn.Linear(12, 1)), data(6, 2, 5)),
}
# of float32: other kernels, whose sums have up to 36 terms
CLOSE: dict[torch.dtype, Any] = {torch.float64: {"rtol": 1e-9, "atol": 1e-12}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    norms: Tensor = gradient.flatten(1).norm(dim=1)
    return (norms - 1.0).square().mean()


def pair(kind: str, make: Callable[[nn.Module], object]) -> tuple[nn.Module, nn.Module, object]:
    torch.manual_seed(0)
    model = MODELS[kind][0]().double()
    plain = copy.deepcopy(model)
    return model, plain, make(model)


@pytest.mark.entry("F15", "a loss has a gradient penalty, or you take second derivatives (`create_graph=True`)", "works",
                   "a backward pass that is differentiated has plain gradients, so second derivatives are torch's; under "
                   "autocast it raises ConfigError")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("make", [lambda m: NGSGD(m, 1e-3), NaturalMuon], ids=["NGSGD", "NaturalMuon"])
@pytest.mark.parametrize("dtype", CLOSE)
def test_gradients_of_a_penalty_are_plain(kind: str, make: Callable[[nn.Module], object], dtype: torch.dtype) -> None:
    model, plain, optimizer = pair(kind, make)
    x = MODELS[kind][1].to(dtype)
    model.to(dtype), plain.to(dtype)
    found, expected = (torch.autograd.grad(penalty(one, x), list(one.parameters()), allow_unused=True) for one in (model, plain))
    assert sum(g is not None and float(g.norm()) > 1e-6 for g in expected) > 1
    for g, h in zip(found, expected, strict=True):
        assert (g is None) == (h is None)
        if g is not None and h is not None:
            torch.testing.assert_close(g, h, **CLOSE[dtype])
    assert optimizer is not None


@pytest.mark.entry("F15")
def test_a_loss_with_a_penalty_trains() -> None:
    model, _, _ = pair("linear", lambda m: None)
    optimizer = NGSGD(model, 1e-2, loss_reduction="mean")
    x, values = MODELS["linear"][1], []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - 1.0).square().mean() + penalty(model, x)
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < 0.5 * values[0]


@pytest.mark.entry("F15")
def test_hessians_are_torchs() -> None:
    model, plain, optimizer = pair("linear", lambda m: NGSGD(m, 1e-3))
    x = MODELS["linear"][1][0]
    found, expected = (torch.autograd.functional.hessian(lambda x, one=one: one(x).square().sum(), x) for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    of_func = torch.func.hessian(lambda x: model(x).square().sum())(x)
    torch.testing.assert_close(of_func, expected, rtol=1e-9, atol=1e-12)
    assert expected.norm() > 1e-6 and optimizer is not None


@pytest.mark.entry("F15")
def test_the_second_derivative_of_an_inner_step_is_torchs() -> None:
    model, plain, optimizer = pair("linear", lambda m: NGSGD(m, 1e-3))
    x = MODELS["linear"][1]
    results = []
    for one in (model, plain):
        parameters = dict(one.named_parameters())
        inner = torch.autograd.grad(one(x).square().mean(), list(parameters.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), inner, strict=True)}
        outer = torch.func.functional_call(one, moved, (x + 1.0,)).square().mean()
        results.append(torch.autograd.grad(outer, list(parameters.values())))
    for g, h in zip(*results, strict=True):
        torch.testing.assert_close(g, h, rtol=1e-9, atol=1e-12)
        assert h.norm() > 1e-6
    assert optimizer is not None


@pytest.mark.entry("F15")
def test_a_penalty_under_autocast_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = NGSGD(model, 1e-3)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
        penalty(model, torch.randn(6, 5))
    assert optimizer.preconditioned
