"""Every quantity of every kind of layer and loss against its definition."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from ngsgd.errors import ConfigError
from tests.curvature.problems import PROBLEMS, N, problem
from tests.reference.curvature import ggn_blocks, hessian_blocks, individual_gradients, jacobians, loss_derivatives

FIRST = ("batch_grad", "batch_l2", "sum_grad_squared", "second_moment", "variance")
GGN = ("diag_ggn", "batch_diag_ggn", "sqrt_ggn")


def close(fast: Tensor, reference: Tensor) -> None:
    """float64 on both sides; a few hundred roundings."""
    scale = float(reference.detach().abs().max())
    torch.testing.assert_close(fast.reshape(reference.shape), reference, rtol=1e-10, atol=1e-11 * max(scale, 1e-3))


def _targets(name: str, output: Tensor) -> tuple[nn.Module, Tensor]:
    rows = output.shape[:1] + output.shape[2:]
    y = torch.randint(output.shape[1], rows)
    if name == "cross-entropy":
        return nn.CrossEntropyLoss(), y
    if name == "summed cross-entropy":
        return nn.CrossEntropyLoss(reduction="sum"), y
    if name == "weighted cross-entropy":
        y = torch.arange(y.numel()).view_as(y) % output.shape[1]  # frame 1 is ignored
        weight = torch.rand(output.shape[1], dtype=torch.float64) + 0.1
        return nn.CrossEntropyLoss(weight=weight, ignore_index=1, label_smoothing=0.1), y
    if name == "soft targets":
        return nn.CrossEntropyLoss(label_smoothing=0.2), torch.rand_like(output).softmax(dim=1)
    if name == "squared error":
        return nn.MSELoss(), torch.randn_like(output)
    return nn.BCEWithLogitsLoss(pos_weight=torch.rand(output.shape[1], dtype=torch.float64) + 0.5), torch.rand_like(output).round()


LOSSES = ("cross-entropy", "summed cross-entropy", "weighted cross-entropy", "soft targets", "squared error", "binary "
                                                                                                              "cross-entropy")


CELLS = [(name, "cross-entropy") for name in PROBLEMS]
CELLS += [(name, loss) for name in ("linear", "functional", "lstm") for loss in LOSSES[1:]]


@pytest.mark.parametrize(("name", "loss_name"), CELLS)
def test_first_order_quantities_and_diagonal_ggn_equal_their_definitions(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = _targets(loss_name, model(x).detach())
    with collect(model, *FIRST, *GGN, loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    J = jacobians(model, x, N)
    d_NF, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    blocks = ggn_blocks(J, H_NFF)
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


HESSIAN = ("linear", "linear without bias", "linear over frames", "conv1d", "conv1d same", "conv1d dilated same", "conv2d",
           "conv2d circular", "conv3d", "batch norm", "batch norm of rows", "dropout", "residual", "tdnnf with batch norm")


HESSIAN_CELLS = [(name, "cross-entropy") for name in HESSIAN] + [("residual", loss) for loss in LOSSES[1:]]


@pytest.mark.parametrize(("name", "loss_name"), HESSIAN_CELLS)
def test_the_diagonal_of_the_hessian_equals_its_definition(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = _targets(loss_name, model(x).detach())
    with collect(model, "diag_h", "batch_diag_h", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    single = [hessian_blocks(model, functools.partial(_loss_of, n, loss_fn, y), x) for n in range(N)]
    for parameter in q:
        by_sample = torch.stack([blocks[parameter].diagonal() for blocks in single])
        close(q[parameter].batch_diag_h, by_sample)
        close(q[parameter].diag_h, by_sample.sum(dim=0))


def _loss_of(n: int, loss_fn: nn.Module, y: Tensor, f: Tensor) -> Tensor:
    """The share of sample n in the loss: the others' outputs are held fixed, which leaves its derivatives."""
    fixed = f.detach().clone()
    return loss_fn(torch.cat([fixed[:n], f[n:n + 1], fixed[n + 1:]]), y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["lstm", "attention", "layer norm", "p-norm", "functional", "embedding"])
def test_the_diagonal_of_the_hessian_is_refused_where_it_is_not_known(name: str) -> None:
    model, x, num_classes = problem(name)
    loss_fn = nn.CrossEntropyLoss()
    with pytest.raises(ConfigError, match="diag_h"), collect(model, "diag_h", loss_fn=loss_fn):
        loss_fn(model(x), torch.arange(N) % num_classes).backward()
