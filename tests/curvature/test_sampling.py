"""Monte-Carlo quantities against their exact values.

A mean over M draws deviates by about M^(-1/2). Bounds are six standard deviations, estimated from
the samples themselves: with the seed fixed a test either passes or not; over seeds one of its about
60 numbers would be outside once in 10^7.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from tests.curvature.problems import N, problem

DRAWS = 4000


def _loss(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    if name == "cross-entropy":
        return nn.CrossEntropyLoss(weight=torch.rand(3).double() + 0.5), torch.arange(N) % 3
    if name == "squared error":
        return nn.MSELoss(), torch.randn(N, 3).double()
    return nn.BCEWithLogitsLoss(pos_weight=torch.rand(3).double() + 0.5), torch.rand(N, 3).double().round()


@pytest.mark.parametrize("name", ["cross-entropy", "squared error", "binary cross-entropy"])
def test_monte_carlo_samples_have_the_exact_curvature_as_mean(name: str) -> None:
    model, x, _ = problem("linear")
    loss_fn, y = _loss(name)
    first, activation, last = model.children()
    head = nn.Sequential(last)  # draws are cheap there
    rows = activation(first(x)).detach()
    generator = torch.Generator().manual_seed(2)
    with collect(head, "diag_ggn", "sqrt_ggn_mc", loss_fn=loss_fn, mc_samples=DRAWS, generator=generator) as q:
        loss_fn(head(rows), y).backward()
    for parameter in q:
        # each draw's estimate
        by_draw = (q[parameter].sqrt_ggn_mc * DRAWS**0.5).square().sum(dim=1)
        error = by_draw.mean(dim=0) - q[parameter].diag_ggn
        assert (error.abs() <= 6.0 * by_draw.std(dim=0) / DRAWS**0.5 + 1e-15).all()


def test_one_seed_gives_one_value_and_another_seed_another() -> None:
    model, x, _ = problem("conv2d")
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(N) % 3

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        with collect(model, "diag_ggn_mc", "batch_diag_ggn_mc", loss_fn=loss_fn, generator=generator) as q:
            loss_fn(model(x), y).backward()
        of = q["0.weight"]
        # an order of summation
        torch.testing.assert_close(of.batch_diag_ggn_mc.sum(dim=0), of.diag_ggn_mc, rtol=1e-12, atol=0.0)
        found: Tensor = of.diag_ggn_mc
        return found

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
