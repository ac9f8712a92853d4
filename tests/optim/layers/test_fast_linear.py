"""Affine layers of plain SGD with the GEMM of NG-SGD: equal up to rounding; plain for others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, curvature
from ngsgd.ops import gemm
from ngsgd.optim.layers.fast_linear import FastLinear
from ngsgd.optim.layers.linear import NaturalGradientLinear
from ngsgd.optim.sgd import SGD

# 2^21 multiplications or more, so that the other GEMM is used
N, D = 160, 128


@pytest.fixture(autouse=True)
def faster_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    if not gemm.is_there():
        pytest.skip("this torch has no oneDNN operators")
    monkeypatch.setattr(gemm, "is_faster", lambda: True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


def class_of(model: nn.Sequential) -> object:
    return type(model[0])


def inputs() -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x_ND: Tensor) -> list[Tensor]:
    loss = model(x_ND).square().sum()
    return list(torch.autograd.grad(loss, [*model.parameters(), x_ND] if x_ND.requires_grad else list(model.parameters())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_the_plain_layer(dtype: torch.dtype) -> None:
    plain, model = network().to(dtype), network().to(dtype)
    optimizer = SGD(model, 0.1)
    x_ND = inputs().to(dtype).requires_grad_()
    assert class_of(model) is FastLinear
    for found, wanted in zip(gradients(model, x_ND), gradients(plain, x_ND), strict=True):
        # sums of N float32 products of size about 10 in another order
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-2 if dtype == torch.float32 else 1e-10)
    del optimizer
    assert class_of(model) is nn.Linear
    assert vars(model[0]).keys() == vars(plain[0]).keys()


def test_under_autocast_the_products_are_those_of_torch() -> None:
    plain, model = network(), network()
    optimizer = SGD(model, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = gradients(model, inputs()), gradients(plain, inputs())
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype == torch.float32
        # bfloat16 has 8 bits
        assert float((a - b).norm()) < 0.02 * float(b.norm())
    assert optimizer.param_groups


def test_a_gradient_can_be_differentiated() -> None:
    def second(model: nn.Module) -> list[Tensor]:
        found = torch.autograd.grad(model(inputs()).square().mean(), list(model.parameters()), create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.square().sum() for g in found]).sum(), list(model.parameters())))

    plain, model = network(), network()
    optimizer = SGD(model, 0.1)
    for a, b in zip(second(model), second(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert optimizer.param_groups


def test_copies_are_plain_and_the_class_can_be_left_alone() -> None:
    model = network()
    optimizer = SGD(model, 0.1)
    copied = copy.deepcopy(model)
    assert class_of(copied) is nn.Linear and vars(copied[0]).keys() == vars(network()[0]).keys()
    assert type(copy.deepcopy(optimizer)) is SGD
    left = network()
    SGD(left, 0.1, fast_gemm=False)
    assert class_of(left) is nn.Linear


def test_a_layer_belongs_to_the_last_optimizer() -> None:
    model = network()
    first = SGD(model, 0.1)
    second = SGD(model, 0.1)
    del first
    assert class_of(model) is FastLinear
    natural = NGSGD(model, 0.1)
    del second
    assert class_of(model) is NaturalGradientLinear
    natural.detach()
    assert class_of(model) is nn.Linear


def test_curvature_of_a_model_under_sgd_is_that_of_the_plain_model() -> None:
    def variance(model: nn.Module) -> Tensor:
        loss_fn = nn.MSELoss()
        with curvature.collect(model, "variance", loss_fn=loss_fn) as found:
            loss_fn(model(inputs()), torch.zeros(N, D)).backward()
        value: Tensor = found["0.weight"].variance
        return value

    plain, model = network(), network()
    optimizer = SGD(model, 0.1)
    torch.testing.assert_close(variance(model), variance(plain), rtol=1e-3, atol=1e-9)
    assert optimizer.param_groups


def test_a_single_layer_keeps_its_name() -> None:
    layer = nn.Linear(D, D)
    names = [SGD(layer, 0.1).param_groups[0]["name"] for _ in range(2)]
    assert names == ["Linear", "Linear"]
