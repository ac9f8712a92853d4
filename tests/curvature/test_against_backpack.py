"""BackPACK's numbers, for the networks and losses that it takes; skipped without the package."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from tests.curvature.problems import problem
from tests.curvature.support import close, targets

backpack = pytest.importorskip("backpack", reason="a peer of the dev extra")
extensions = pytest.importorskip("backpack.extensions")

FIRST = {"batch_grad": "BatchGrad", "batch_l2": "BatchL2Grad", "sum_grad_squared": "SumGradSquared", "variance": "Variance"}
DIAGONAL = {"diag_ggn": "DiagGGNExact", "batch_diag_ggn": "BatchDiagGGNExact"}
HESSIAN = {"diag_h": "DiagHessian", "batch_diag_h": "BatchDiagHessian"}
FACTORS = {"kflr": "KFLR"}
ALL = {**FIRST, **DIAGONAL, "sqrt_ggn": "SqrtGGNExact", **HESSIAN, **FACTORS}
PRODUCTS = {"hmp": "HMP", "ggnmp": "GGNMP", "pchmp": "PCHMP"}
NETS: dict[str, dict[str, str]] = {
    "linear": {**ALL, **PRODUCTS, "kfra": "KFRA"},
    # behind a sigmoid PCHMP multiplies by the loss's derivative twice
    "linear without bias": {**ALL, "hmp": "HMP", "ggnmp": "GGNMP", "kfra": "KFRA"},
    "linear over frames": {**FIRST, **DIAGONAL},
    "conv1d": ALL,
    "convolutions in two dimensions": {**ALL, **PRODUCTS},
    "conv3d": ALL,
    "batch norm of rows": {**FIRST, **DIAGONAL, "sqrt_ggn": "SqrtGGNExact"},
    "dropout": {**ALL, **PRODUCTS},
    "lstm of one layer": FIRST}
BINARY = "binary cross-entropy of one output"   # it takes no more, and for products and KFRA none
LOSSES = ("cross-entropy", "summed cross-entropy", "squared error", BINARY)
CELLS = [(net, loss, quantity) for net, quantities in NETS.items() for loss in LOSSES for quantity in quantities
         if not (loss == BINARY and quantity in (*PRODUCTS, "kfra"))
         # where it mixes float32 into float64 and raises
         and (loss, quantity) != ("squared error", "kfra")]


class _Last(nn.Module):
    """The last frame."""

    def forward(self, given: Any) -> Tensor:
        y: Tensor = given[0][:, -1]
        return y


def _problem(name: str, loss_name: str) -> tuple[nn.Module, Tensor]:
    model, x = _network(name)
    return (nn.Sequential(*model.children(), nn.Linear(3, 1).double()) if loss_name == BINARY else model), x


def _network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "convolutions in two dimensions":
        layers = (nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))
        return nn.Sequential(*layers).double(), torch.randn(4, 2, 6, 6).double()
    if name == "lstm of one layer":
        return nn.Sequential(nn.LSTM(6, 3, batch_first=True), _Last()).double(), torch.randn(4, 5, 6).double()
    model, x, _ = problem(name)
    return model, x


def _targets(name: str, output: Tensor) -> tuple[nn.Module, Tensor]:
    if name == BINARY:
        return nn.BCEWithLogitsLoss(), torch.rand_like(output).round()
    loss_fn, y = targets(name, output)
    return loss_fn, y


def _theirs(model: nn.Module, x: Tensor, loss_fn: nn.Module, y: Tensor, extension: Any) -> dict[str, Any]:
    model, loss_fn = backpack.extend(copy.deepcopy(model)), backpack.extend(copy.deepcopy(loss_fn))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with backpack.backpack(extension):
            loss_fn(model(x), y).backward()
    return {name: getattr(p, extension.savefield) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("net", "loss_name", "quantity"), CELLS)
def test_the_peer_has_the_same_numbers(net: str, loss_name: str, quantity: str) -> None:
    model, x = _problem(net, loss_name)
    loss_fn, y = _targets(loss_name, model(x).detach())
    theirs = _theirs(model, x, loss_fn, y, getattr(extensions, NETS[net][quantity])())
    with collect(model, quantity, loss_fn=loss_fn, sharing="backpack", normalization="backpack") as q:
        loss_fn(model(x), y).backward()
    assert set(q) == set(theirs)
    for name, p in model.named_parameters():
        ours = getattr(q[name], quantity)
        if quantity in PRODUCTS:
            v = torch.randn(2, *p.shape, dtype=torch.float64)
            # its default
            close(ours(v, modify="clip") if quantity == "pchmp" else ours(v), theirs[name](v))
        elif quantity in ("kflr", "kfra"):
            for factor, reference in zip(ours, theirs[name], strict=False):   # a bias has one
                close(factor, reference)
        elif quantity == "sqrt_ggn":   # roots differ by a rotation
            close(_product(ours), _product(theirs[name]))
        else:
            close(ours, theirs[name])


def _product(root_VN: Tensor) -> Tensor:
    V_XP = root_VN.flatten(2).flatten(0, 1)
    return V_XP.T @ V_XP
