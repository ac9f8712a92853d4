"""Properties of the online preconditioner, and equality with the dense float64 reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ngsgd import OnlineNaturalGradient
from ngsgd.errors import DivergenceError
from tests.reference.online_natural_gradient import DenseFisher


def rows(num: int, dim: int, seed: int) -> Tensor:
    """Correlated rows: a few strong directions and noise."""
    generator = torch.Generator().manual_seed(seed)
    strong = torch.randn(num, 3, generator=generator, dtype=torch.float64) @ torch.randn(3, dim, generator=generator,
                                                                                       dtype=torch.float64)
    return 2.0 * strong + torch.randn(num, dim, generator=generator, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(dim=st.integers(3, 14), rank=st.integers(1, 8), num_rows=st.integers(2, 40),
       alpha=st.sampled_from([0.1, 1.0, 4.0, 10.0]), seed=st.integers(0, 10_000))
def test_equals_the_dense_reference(dim: int, rank: int, num_rows: int, alpha: float, seed: int) -> None:
    fast = OnlineNaturalGradient(rank, alpha=alpha)
    for t in range(3):  # away from the start, where float noise decides directions
        fast.precondition(rows(num_rows + 20, dim, seed + t))
    state = fast.state_dict()
    dense = DenseFisher.from_w(state["W"].numpy(), state["d"].numpy(), float(state["rho"]), alpha=alpha)
    eta = min(0.9, 1 - math.exp(-num_rows / 2000))
    for t in range(10, 15):
        X = rows(num_rows, dim, seed + t)
        xhat, scale = fast.precondition(X)
        dense_xhat, gamma = dense.precondition(X.numpy())
        dense.update(X.numpy(), eta)
        # both float64; Z squares the condition number of the Fisher matrix, at most 1 / delta =
        # 2000, so 1e-16 * 4e6
        np.testing.assert_allclose(xhat.numpy(), dense_xhat, rtol=1e-7, atol=1e-8 * float(X.abs().max()))
        np.testing.assert_allclose(float(scale), gamma, rtol=1e-7)
    W = fast.state_dict()["W"].numpy()
    np.testing.assert_allclose(W.T @ W, dense.W.T @ dense.W, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num", "dim", "rank"), [(64, 20, 5), (4, 20, 8), (1, 5, 2), (7, 2, 30)])
def test_the_scaled_result_keeps_the_norm(num: int, dim: int, rank: int, dtype: torch.dtype) -> None:
    ng = OnlineNaturalGradient(rank)
    for t in range(20):
        X = rows(num, dim, t).to(dtype)
        xhat, scale = ng.precondition(X)
        assert float((scale * xhat).norm()) == pytest.approx(float(X.norm()), rel=1e-5)


def test_the_input_is_not_modified() -> None:
    X = rows(10, 6, 0)
    before = X.clone()
    OnlineNaturalGradient(2).precondition(X)
    assert torch.equal(X, before)


def test_strong_directions_are_shortened_relative_to_weak_ones() -> None:
    ng = OnlineNaturalGradient(2, alpha=0.1)
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([10.0, 1.0, 1.0, 1.0])
    for _ in range(20):
        X = torch.randn(200, 4, generator=generator) * size
        xhat, _ = ng.precondition(X)
    ratio = xhat.norm(dim=0) / X.norm(dim=0)
    assert ratio[0] < 0.1 * ratio[1:].min()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_non_finite_values_never_enter_the_state(bad: float) -> None:
    clean, spoilt = OnlineNaturalGradient(3), OnlineNaturalGradient(3, on_nonfinite="skip")
    for t in range(5):
        for ng in (clean, spoilt):
            ng.precondition(rows(20, 8, t).float())
    X = rows(20, 8, 99).float()
    X[3, 4] = bad
    spoilt.precondition(X)
    with pytest.raises(DivergenceError, match="not finite"):
        clean.precondition(X)
    for key in ("W", "d", "rho"):
        assert torch.equal(clean.state_dict()[key], spoilt.state_dict()[key])


def test_frozen_calls_change_nothing_and_are_not_counted() -> None:
    ng = OnlineNaturalGradient(3)
    ng.precondition(rows(20, 8, 0))
    before = ng.state_dict()
    ng.freeze(True)
    ng.precondition(rows(20, 8, 1))
    after = ng.state_dict()
    assert before["t"] == after["t"] == 1
    assert torch.equal(before["W"], after["W"])


def test_a_loaded_state_continues_bitwise_identically() -> None:
    ng = OnlineNaturalGradient(3, update_period=4)
    for t in range(13):
        ng.precondition(rows(20, 8, t))
    copy = OnlineNaturalGradient(3, update_period=4)
    copy.load_state_dict(ng.state_dict())
    for t in range(13, 20):
        ours, theirs = (p.precondition(rows(20, 8, t)) for p in (ng, copy))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_a_state_that_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid state"):
        OnlineNaturalGradient(3).load_state_dict(
            {"W": torch.zeros(3, 8), "d": torch.zeros(4), "rho": torch.tensor(0.0), "t": 1})


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"update_period": 0}, {"alpha": -1.0}, {"num_samples_history": 0.0},
                                   {"epsilon": 0.0}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        OnlineNaturalGradient(**wrong)  # type: ignore[arg-type]
