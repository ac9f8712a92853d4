"""The paper's limit on the change of a layer (C.3) against Kaldi's nnet2 (golden/maxchange.npz,
cases s*).

Kaldi maximises its objective: the gradient of our loss is minus the derivative in the vectors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, precondition_simple
from ngsgd.errors import NgsgdWarning
from ngsgd.ops.max_change import max_change_limits, row_product_factor
from tests.conftest import Golden

GOLDEN = Golden("maxchange.npz")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
# of the movement so far: Kaldi's float32; the vectors' own figures of it ("measured") are up to
# 3e-5
TOLERANCE = 2e-4


def cases(kind: str) -> list[str]:
    return [case for case in GOLDEN.cases("s") if GOLDEN.config(case)["kind"] == kind]


def minibatch(case: str, t: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(input rows, derivatives of the objective)."""
    return torch.tensor(GOLDEN(case, f"X_{t:02d}"), dtype=dtype), torch.tensor(GOLDEN(case, f"dY_{t:02d}"), dtype=dtype)


def check_parameters(case: str, t: int, ours: Tensor) -> None:
    start, after = (GOLDEN(case, name).astype(np.float64) for name in ("params", f"after_{t:02d}"))
    error = np.linalg.norm(ours.detach().double().numpy() - after)
    assert error <= TOLERANCE * np.linalg.norm(after - start), (case, t)


def check_factor(case: str, t: int, factor: float) -> None:
    golden = GOLDEN(case, "factor")[t]
    # scales and norms of Kaldi's float32
    assert factor == pytest.approx(golden, rel=TOLERANCE), (case, t)
    assert (factor == 1.0) == (golden == 1.0), (case, t)


def layer(case: str, dtype: torch.dtype) -> nn.Linear:
    params = torch.tensor(GOLDEN(case, "params"), dtype=dtype)
    affine = nn.Linear(params.shape[1] - 1, len(params), dtype=dtype)
    with torch.no_grad():
        affine.weight.copy_(params[:, :-1])
        affine.bias.copy_(params[:, -1])
    return affine


def nnet2_optimizer(config: dict[str, Any], model: nn.Module, **options: Any) -> NGSGD:
    made = NGSGD(model, config["learning_rate"], schedule="nnet2", max_change=0.0, max_param_change=0.0,
                 max_change_per_sample=config["max_change_per_sample"], update_period=config["update_period"],
                 num_samples_history=config["num_samples_history"], alpha=config["alpha"], **options)
    for name, preconditioner in made.preconditioners():
        # ranks written in a Kaldi config are lowered to D - 1 only; ours to (D + 1) / 2
        preconditioner.rank = config["rank_in"] if name.endswith("input") else config["rank_out"]
    return made


@DTYPES
@pytest.mark.parametrize("case", cases("online"))
def test_layer_steps_equal_kaldis_nnet2(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GOLDEN.config(case)
    model = layer(case, dtype)
    optimizer = nnet2_optimizer(config, model)
    factors: list[float] = []

    def recorded(*args: Any) -> Tensor:
        factors.append(float(row_product_factor(*args)))
        return row_product_factor(*args)
    monkeypatch.setattr("ngsgd.optim.natural_gradient.row_product_factor", recorded)
    for t in range(config["T"]):
        X, dY = minibatch(case, t, dtype)
        optimizer.zero_grad()
        model(X).backward(-dY)
        optimizer.step()
        check_parameters(case, t, torch.cat([model.weight, model.bias[:, None]], dim=1))
        if config["max_change_per_sample"]:
            check_factor(case, t, factors[-1])
    assert len(factors) == (config["T"] if config["max_change_per_sample"] else 0)


@DTYPES
@pytest.mark.parametrize("case", cases("simple"))
def test_simple_steps_equal_kaldis_nnet2(case: str, dtype: torch.dtype) -> None:
    config = GOLDEN.config(case)
    lr, limit = config["learning_rate"], config["max_change_per_minibatch"]
    params = torch.tensor(GOLDEN(case, "params"), dtype=dtype)
    for t in range(config["T"]):
        X, dY = minibatch(case, t, dtype)
        Xbar = precondition_simple(torch.cat([X, X.new_ones(len(X), 1)], dim=1), config["alpha"])
        dYbar = precondition_simple(dY, config["alpha"])
        products = (Xbar.norm(dim=1) * dYbar.norm(dim=1)).sum()
        # this older limit is per minibatch, not per sample
        factor = float(row_product_factor(products, 1, lr, limit)) if limit else 1.0
        check_factor(case, t, factor)
        params = params + lr * factor * dYbar.T @ Xbar
        check_parameters(case, t, params)


# its steps are large, so that the parameters are little else than the sum of them
LIMITED_NOW_AND_THEN = "s06"


def relative_difference(ours: nn.Linear, theirs: nn.Linear) -> float:
    a, b = (nn.utils.parameters_to_vector(affine.parameters()).detach() for affine in (ours, theirs))
    return float((a - b).norm() / b.norm())


def test_frames_that_do_not_count_neither_raise_the_limit_nor_enter_the_estimates() -> None:
    case = LIMITED_NOW_AND_THEN
    padded, plain = layer(case, torch.float64), layer(case, torch.float64)
    config = GOLDEN.config(case)
    optimizers = nnet2_optimizer(config, padded, ignore_zero_rows=True), nnet2_optimizer(config, plain)
    for t in range(config["T"]):
        X, dY = minibatch(case, t, torch.float64)
        junk = torch.full((50, X.shape[1]), 3.0, dtype=X.dtype)
        for optimizer in optimizers:
            optimizer.zero_grad()
        padded(torch.cat([X, junk])).backward(-torch.cat([dY, dY.new_zeros(50, dY.shape[1])]))
        plain(X).backward(-dY)
        for optimizer in optimizers:
            optimizer.step()
        # the same sums with zeros in between, but for the factor, which is a float32
        assert relative_difference(padded, plain) <= 1e-6


@DTYPES
def test_a_loss_scale_that_changes_enters_neither_the_limit_nor_the_estimates(dtype: torch.dtype) -> None:
    case = LIMITED_NOW_AND_THEN
    scaled, plain = layer(case, dtype), layer(case, dtype)
    config = GOLDEN.config(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    optimizers = nnet2_optimizer(config, scaled, grad_scaler=scaler), nnet2_optimizer(config, plain)
    for t in range(config["T"]):
        X, dY = minibatch(case, t, dtype)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((scaled(X) * -dY).sum()).backward()
        (plain(X) * -dY).sum().backward()
        scaler.step(optimizers[0])
        optimizers[1].step()
        scaler.update()
        # a few roundings: the scales are powers of two
        assert relative_difference(scaled, plain) <= (1e-5 if dtype == torch.float32 else 1e-12)
    assert scaler.get_scale() > 1000.0


def test_the_factor_is_one_below_the_limit_and_proportional_above_it() -> None:
    products = torch.tensor(100.0, dtype=torch.float64)
    assert float(row_product_factor(products, 10, 0.01, 0.2)) == 1.0
    # one division
    assert float(row_product_factor(products, 10, 0.04, 0.2)) == pytest.approx(0.5, rel=1e-15)
    # float32 count
    assert float(row_product_factor(products, torch.tensor(5.0), 0.04, 0.2)) == pytest.approx(0.25, rel=1e-7)


@pytest.mark.parametrize("num_rows", [0.0, 10.0])
def test_a_derivative_of_zeros_and_a_minibatch_without_rows_that_count_are_not_limited(num_rows: float) -> None:
    assert float(row_product_factor(torch.tensor(0.0), num_rows, 0.1, 0.075)) == 1.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_products_that_are_not_finite_pass_nothing_to_the_parameters(bad: float) -> None:
    factor = row_product_factor(torch.tensor(bad), 10, 0.1, 0.075)
    for norm in (1.0, bad):  # products may overflow where the gradient does not
        limits = max_change_limits(torch.tensor([norm]) * factor, torch.tensor([0.0]), 0.0)
        assert not limits.is_finite or float(factor) == 0.0


def test_a_row_whose_norm_overflows_but_has_no_derivative_does_not_lift_the_limit() -> None:
    case = LIMITED_NOW_AND_THEN
    model = layer(case, torch.float32)
    optimizer = nnet2_optimizer({**GOLDEN.config(case), "max_change_per_sample": 1e-3}, model)
    before = model.weight.detach().clone()
    X, dY = minibatch(case, 0, torch.float32)
    X[0], dY[0] = 1e20, 0.0  # inf * 0 in the sum of products, 1e20 * 0 in the gradient
    model(X).backward(-dY)
    with pytest.warns(NgsgdWarning):
        optimizer.step()
    assert float((model.weight.detach() - before).norm()) <= len(X) * 1e-3
