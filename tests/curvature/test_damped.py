"""The damped update against dense solves, and the noise of gradients against its expectation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ngsgd.curvature import Kronecker, collect
from ngsgd.curvature.second_order.damped import damped_direction
from ngsgd.curvature.second_order.noise import gradient_noise
from ngsgd.errors import DivergenceError
from tests.curvature.support import close


def _spd(dim: int) -> torch.Tensor:
    x = torch.randn(dim, dim).double()
    return x @ x.T


def test_the_kronecker_direction_solves_the_dense_damped_system() -> None:
    torch.manual_seed(0)
    B, A, g, theta = _spd(3), _spd(4) * 7.0, torch.randn(3, 4).double(), torch.randn(3, 4).double()
    pi = ((A.trace() / 4) / (B.trace() / 3)).sqrt()
    d = (0.1 + 0.02) ** 0.5
    dense = torch.kron(B + d / pi * torch.eye(3).double(), A + d * pi * torch.eye(4).double())
    expected = torch.linalg.solve(dense, (g + 0.02 * theta).flatten())
    close(damped_direction(g, theta, Kronecker(B, A), damping=0.1, l2=0.02).flatten(), expected)
    of_bias = damped_direction(g[:, 0], theta[:, 0], Kronecker(B, None), damping=0.1)
    close(of_bias, torch.linalg.solve(B + 0.1 * torch.eye(3).double(), g[:, 0]))


def test_a_convolution_keeps_its_shape_and_a_zero_factor_shares_nothing() -> None:
    g = torch.randn(2, 3, 5).double()
    direction = damped_direction(g, g, Kronecker(torch.zeros(2, 2).double(), torch.zeros(15, 15).double()), damping=0.25)
    close(direction, g / 0.25)


def test_unsolvable_systems_are_reported() -> None:
    with pytest.raises(DivergenceError, match="positive definite"):
        damped_direction(torch.ones(2), torch.ones(2), Kronecker(torch.full((2, 2), float("nan")), None), damping=0.1)
    with pytest.raises(ValueError, match="damping"):
        damped_direction(torch.ones(2), torch.ones(2), torch.ones(2), damping=0.0)


def test_steps_against_the_direction_converge_where_plain_ones_crawl() -> None:
    """Least squares of condition 1e4: the exact curvature makes it one of condition 1."""
    torch.manual_seed(0)
    layer, scale = nn.Linear(4, 2, bias=False).double(), torch.tensor([1.0, 10.0, 30.0, 100.0]).double()
    x, loss_fn = torch.randn(64, 4).double() * scale, nn.MSELoss()
    y = x @ torch.randn(4, 2).double()
    for _ in range(20):
        layer.zero_grad()
        with collect(layer, "kflr", loss_fn=loss_fn) as q:
            loss = loss_fn(layer(x), y)
            loss.backward()
        with torch.no_grad():
            assert layer.weight.grad is not None
            layer.weight -= damped_direction(layer.weight.grad, layer.weight, q["weight"].kflr, damping=1e-6)
    assert float(loss) < 1e-6


def test_the_noise_scale_is_that_of_the_distribution() -> None:
    """Linear in its parameter: g_n = x_n of mean 1 and variance 4 in 10 dimensions, so S = 40,
    |g|^2 = 10. 20000 samples: the estimates deviate by less than a percent (one standard
    deviation); bounds are five of them.
    """
    torch.manual_seed(0)
    layer, x = nn.Linear(10, 1, bias=False).double(), 1.0 + 2.0 * torch.randn(20000, 10).double()
    with collect(layer, "variance", "second_moment", reduction="mean") as q:
        layer(x).mean().backward()
    noise = gradient_noise(q, 20000)
    assert noise["weight"].trace == pytest.approx(40.0, rel=0.05)
    assert noise[""].squared_norm == pytest.approx(10.0, rel=0.05)
    assert noise[""].noise_scale == pytest.approx(4.0, rel=0.1)
