"""Inspection of Fisher estimates, against the estimates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd import NGSGD
from ngsgd.ops.natural_gradient import FisherState, Smoothing, spectrum
from ngsgd.optim.inspection import figures, inspect


def trained(num_directions: int, cosine_period: int = 0) -> NGSGD:
    """A layer whose inputs have `num_directions` strong directions, after 60 minibatches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 10))
    optimizer = NGSGD(model, lr=1e-4, cosine_period=cosine_period)
    strong = 10.0 * torch.randn(num_directions, 40)
    for _ in range(60):
        x = torch.randn(64, num_directions) @ strong + 0.1 * torch.randn(64, 40)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.randint(10, (64,)), reduction="sum").backward()
        optimizer.step()
    return optimizer


def test_the_spectrum_is_the_attenuation_of_each_direction() -> None:
    optimizer = trained(5)
    (estimate,) = (p for name, p in optimizer.preconditioners() if name == "0.input")
    state = estimate.state
    assert state is not None
    R = state.W_RD / state.W_RD.norm(dim=1, keepdim=True)  # its directions
    left = (R - (R @ state.W_RD.T) @ state.W_RD).norm(dim=1)
    e = np.array(inspect(optimizer)["0"].estimates["input"].e)
    np.testing.assert_allclose(np.sort(1.0 - left.numpy()), np.sort(e), atol=1e-4)  # float32


def test_effective_rank_and_share_see_the_strong_directions() -> None:
    health = inspect(trained(5))["0"].estimates["input"]
    assert (health.dim, health.rank) == (41, 20)
    assert 3.0 < health.effective_rank <= 5.5
    assert health.captured > 0.99


def test_a_round_scatter_has_full_effective_rank() -> None:
    state = FisherState(torch.zeros(3, 12), np.full(3, 1e-9), 1.0)
    assert spectrum(state, Smoothing(4.0, 1e-10, 5e-4)).max() < 1e-8


def test_the_cosine_is_to_the_plain_gradient_and_only_there_when_asked_for() -> None:
    assert math.isnan(inspect(trained(5))["0"].cosine)
    optimizer = trained(5, cosine_period=60)  # measured in the pass after the 60th step
    layer = optimizer.layer_preconditioners()["0"]
    x, dy = torch.randn(8, 40), torch.randn(8, 10)
    preconditioned = layer.gradient(x, dy)[0]  # type: ignore[attr-defined]
    plain = dy.T @ x
    cosine = float((preconditioned * plain).sum() / preconditioned.norm() / plain.norm())
    assert inspect(optimizer)["0"].cosine == pytest.approx(cosine, abs=1e-6)  # float32
    assert figures(optimizer)["0/cosine"] == inspect(optimizer)["0"].cosine


def test_layers_without_data_are_skipped() -> None:
    optimizer = NGSGD(nn.Sequential(nn.Linear(4, 3)), lr=1e-3)
    assert inspect(optimizer) == {} and figures(optimizer) == {}
