"""First-order quantities and diagonals of every kind of layer and loss, by their definitions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from ngsgd.errors import ConfigError
from tests.curvature.problems import PROBLEMS, N, problem
from tests.curvature.support import LOSSES, cells, close, drawn, targets
from tests.reference.curvature import ggn_blocks, hessian_blocks, individual_gradients, jacobians, loss_derivatives

FIRST = ("batch_grad", "batch_l2", "sum_grad_squared", "second_moment", "variance")
GGN = ("diag_ggn", "batch_diag_ggn", "sqrt_ggn")
SAMPLED = ("diag_ggn_mc", "batch_diag_ggn_mc", "sqrt_ggn_mc")
CELLS = cells(PROBLEMS)


@functools.cache
def _jacobians(name: str) -> dict[str, Tensor]:
    """Of a problem, whose numbers are always the same; they do not depend on the loss."""
    model, x, _ = problem(name)
    return jacobians(model, x, N)


@pytest.mark.parametrize(("name", "loss_name"), CELLS)
def test_first_order_quantities_and_diagonal_ggn_equal_their_definitions(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = targets(loss_name, model(x).detach())
    generator = torch.Generator().manual_seed(7)
    with collect(model, *FIRST, *GGN, *SAMPLED, loss_fn=loss_fn, mc_samples=2, generator=generator) as q:
        loss_fn(model(x), y).backward()
    J = _jacobians(name)
    d_NF, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    blocks = ggn_blocks(J, H_NFF)
    draws_VNF = drawn(loss_fn, model(x).detach(), y, num_draws=2, seed=7)
    scale = N if loss_fn.reduction == "mean" else 1
    assert set(q) == set(J)
    for parameter, g_NP in individual_gradients(J, d_NF).items():
        of, mean_P = q[parameter], scale * g_NP.mean(dim=0)
        close(of.batch_grad, g_NP)
        close(of.batch_l2, g_NP.square().sum(dim=1))
        close(of.sum_grad_squared, g_NP.square().sum(dim=0))
        close(of.second_moment, (scale * g_NP).square().mean(dim=0))
        close(of.variance, (scale * g_NP).square().mean(dim=0) - mean_P.square())
        close(of.diag_ggn, blocks[parameter].sum(dim=0).diagonal())
        close(of.batch_diag_ggn, blocks[parameter].diagonal(dim1=1, dim2=2))
        V_XP = of.sqrt_ggn.flatten(2).flatten(0, 1)
        close(V_XP.T @ V_XP, blocks[parameter].sum(dim=0))
        # the samples themselves: see below
        root_VNP = torch.einsum("vnf,nfp->vnp", draws_VNF, J[parameter])
        close(of.sqrt_ggn_mc, root_VNP)
        close(of.batch_diag_ggn_mc, root_VNP.square().sum(dim=0))
        close(of.diag_ggn_mc, root_VNP.square().sum(dim=(0, 1)))


HESSIAN = ("linear", "linear without bias", "linear over frames", "conv1d", "conv1d same", "conv1d dilated same", "conv2d",
           "conv2d circular", "conv3d", "batch norm", "batch norm of rows", "dropout", "residual", "tdnnf with batch norm",
           "pieces", "activations")
HESSIAN_CELLS = cells(HESSIAN)


@pytest.mark.parametrize(("name", "loss_name"), HESSIAN_CELLS)
def test_the_diagonal_of_the_hessian_equals_its_definition(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = targets(loss_name, model(x).detach())
    with collect(model, "diag_h", "batch_diag_h", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    single = [hessian_blocks(model, functools.partial(_loss_of, n, loss_fn, y), x) for n in range(N)]
    for parameter in q:
        by_sample = torch.stack([blocks[parameter].diagonal() for blocks in single])
        close(q[parameter].batch_diag_h, by_sample)
        close(q[parameter].diag_h, by_sample.sum(dim=0))


def _loss_of(n: int, loss_fn: nn.Module, y: Tensor, f: Tensor) -> Tensor:
    """The share of sample n in the loss, with the outputs of the others held fixed."""
    fixed = f.detach().clone()
    return loss_fn(torch.cat([fixed[:n], f[n:n + 1], fixed[n + 1:]]), y)  # type: ignore[no-any-return]


NO_HESSIAN = ("lstm", "lstm with projection", "gru", "rnn", "attention", "cross-attention", "layer norm", "rms norm over frames",
              "group norm", "p-norm", "sub-classes", "tdnn", "tdnnf", "functional", "embedding")


@pytest.mark.parametrize("quantity", ["diag_h", "batch_diag_h"])
@pytest.mark.parametrize("name", NO_HESSIAN)
def test_the_diagonal_of_the_hessian_is_refused_where_it_is_not_known(name: str, quantity: str) -> None:
    model, x, _ = problem(name)
    for loss_name in LOSSES:
        loss_fn, y = targets(loss_name, model(x).detach())
        with pytest.raises(ConfigError, match=quantity), collect(model, quantity, loss_fn=loss_fn):
            loss_fn(model(x), y).backward()


DRAWS = 4000


def _loss_of_draws(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    if name == "cross-entropy":
        return nn.CrossEntropyLoss(weight=torch.rand(3).double() + 0.5), torch.arange(N) % 3
    if name == "squared error":
        return nn.MSELoss(), torch.randn(N, 3).double()
    return nn.BCEWithLogitsLoss(pos_weight=torch.rand(3).double() + 0.5), torch.rand(N, 3).double().round()


@pytest.mark.parametrize("name", ["cross-entropy", "squared error", "binary cross-entropy"])
def test_monte_carlo_samples_have_the_exact_curvature_as_mean(name: str) -> None:
    """Bounds are six standard deviations, estimated from the samples themselves."""
    model, x, _ = problem("linear")
    loss_fn, y = _loss_of_draws(name)
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
