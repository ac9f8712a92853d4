"""Rows of `OnlineNaturalGradient` and `precondition_simple`: right, or ArgumentError before."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ngsgd.errors import ArgumentError, OptimizerStateError
from ngsgd.ops.simple_natural_gradient import precondition_simple
from ngsgd.optim.fisher.online import OnlineNaturalGradient


def rows(seed: int, dtype: torch.dtype = torch.float64, num: int = 12) -> Tensor:
    return torch.randn(num, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def begun(num: int = 3, rank: int = 2) -> OnlineNaturalGradient:
    estimate = OnlineNaturalGradient(rank)
    for seed in range(num):
        estimate.precondition(rows(seed))
    return estimate


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")   # of torch: a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


WRONG: dict[str, Any] = {
    "int64": torch.ones(3, 5, dtype=torch.int64), "uint8": torch.ones(3, 5, dtype=torch.uint8), "bool": torch.ones(3, 5) > 0,
    "complex": torch.ones(3, 5, dtype=torch.complex64), "vector": torch.ones(5), "number": torch.ones(()),
    "three dimensions": torch.ones(2, 3, 5), "numpy": np.ones((3, 5)), "list": [[1.0] * 5], "None": None,
    "sparse": torch.ones(3, 5).to_sparse(), "meta": torch.ones(3, 5, device="meta"), "nested": nested(),
    "float8": torch.ones(3, 5).to(torch.float8_e4m3fn)}


@pytest.mark.entry("M3", "you give `precondition` integer or boolean rows", "error", "ArgumentError with the dtype")
@pytest.mark.entry("M4", "you give `OnlineNaturalGradient` or `precondition_simple` rows that are no dense real matrix: 1-D, 3-D, "
                         "complex, sparse, NumPy, another width than before", "error",
                   "ArgumentError before anything is computed; rows that require a gradient, and no rows, work")
@pytest.mark.parametrize("kind", WRONG)
def test_other_rows_are_refused_before_anything_changes(kind: str) -> None:
    estimate = begun()
    before = estimate.state_dict()
    new = OnlineNaturalGradient(2)
    for call in (estimate.precondition, estimate.observe, estimate.begin, new.precondition, precondition_simple):
        with pytest.raises(ArgumentError):
            call(WRONG[kind])
    after = estimate.state_dict()
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(after[key])) for key, value in before.items())


@pytest.mark.entry("M4")
def test_another_width_is_refused() -> None:
    estimate = begun()
    with pytest.raises(ArgumentError, match="6"):
        estimate.precondition(torch.ones(3, 6))
    assert not torch.equal(estimate.precondition(rows(9))[0], rows(9))


@pytest.mark.entry("M4")
@pytest.mark.parametrize("make", [OnlineNaturalGradient, begun])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_no_rows_and_no_columns_have_no_effect(make: Any, shape: tuple[int, int]) -> None:
    estimate = make()
    before = estimate.state_dict()
    found, scale = estimate.precondition(torch.zeros(shape, dtype=torch.float64))
    assert found.shape == shape and float(scale) == 1.0 and precondition_simple(torch.zeros(shape)).shape == shape
    assert "W" not in before or torch.equal(estimate.state_dict()["W"], before["W"])


@pytest.mark.entry("M4")
def test_rows_that_require_a_gradient_are_preconditioned_without_a_graph() -> None:
    one, other = begun(), begun()
    for seed in (5, 6):
        found, scale = one.precondition(rows(seed).requires_grad_())
        wanted, _ = other.precondition(rows(seed))
        assert torch.equal(found, wanted) and not found.requires_grad and not scale.requires_grad
        assert not torch.equal(found, rows(seed))


@pytest.mark.entry("M2", "you give `OnlineNaturalGradient.precondition` bfloat16 or float16 rows", "works",
                   "the estimate is float32, and the result has the dtype of the rows")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision_have_an_estimate_in_float32(half: torch.dtype) -> None:
    narrow, wide = OnlineNaturalGradient(2), OnlineNaturalGradient(2)
    for seed in range(8):
        x = rows(seed, half)
        (found, scale), (wanted, wide_scale) = narrow.precondition(x), wide.precondition(x.double())
        assert found.dtype == scale.dtype == half and narrow.state_dict()["W"].dtype in (torch.float32, torch.float64)
        error = (found.double() * scale.double() - wanted * wide_scale).norm() / (wanted * wide_scale).norm()
        assert float(error) <= 2.0 * torch.finfo(half).eps
        # The result is not that of doing nothing.
        assert float((wanted * wide_scale - x.double()).norm()) > 0.03 * float(x.double().norm())


def test_dtypes_may_alternate() -> None:
    mixed, wide = OnlineNaturalGradient(2), OnlineNaturalGradient(2)
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64)):
        x = rows(seed, dtype)
        (found, scale), (wanted, wide_scale) = mixed.precondition(x), wide.precondition(x.double())
        assert found.dtype == dtype
        error = (found.double() * scale.double() - wanted * wide_scale).norm() / (wanted * wide_scale).norm()
        assert float(error) <= max(2.0 * torch.finfo(dtype).eps, 1e-5)


@pytest.mark.entry("M5", "you give `precondition_simple` rows below 1e-11", "works",
                   "a scale of the rows is a scale of the result down to 1e-300; Kaldi's floor hardly changes such rows")
@pytest.mark.parametrize("scale", [1e-9, 1e-10, 1e-11, 1e-12, 1e-30, 1e-200, 1e-300])
@pytest.mark.parametrize("num", [12, 3])
def test_small_rows_are_preconditioned_as_large_ones(num: int, scale: float) -> None:
    x = rows(0, num=num)
    wanted = precondition_simple(x)
    found = precondition_simple(scale * x) / scale
    assert float((found - wanted).norm()) <= 1e-10 * float(wanted.norm())
    assert float((wanted - x).norm()) > 0.05 * float(x.norm())


@pytest.mark.parametrize("alpha", ["4", None, float("inf"), 0.0, -1.0, float("nan"), [4.0]])
def test_alpha_is_checked(alpha: Any) -> None:
    with pytest.raises(ArgumentError):
        precondition_simple(rows(0), alpha)


@pytest.mark.entry("F18")
def test_a_state_of_another_estimate_is_refused() -> None:
    estimate = begun()
    before, state = estimate.state_dict(), begun().state_dict()
    others: list[Any] = [None, [], "state", {}, {"W": state["W"], "t": 3}, {**state, "more": 1},
                         {**state, "W": torch.ones(5, 5), "d": torch.ones(5)}]
    for key, value in state.items():
        for other in ("text", None, torch.ones(2, 2, 2), torch.as_tensor(value) * float("nan"), torch.tensor(1j)):
            others.append({**state, key: other})
        others.append({name: each for name, each in state.items() if name != key})
    estimate.dim = 5
    others.append({**state, "W": torch.ones(2, 7)})
    for other in others:
        with pytest.raises(OptimizerStateError):
            estimate.load_state_dict(other)
    after = estimate.state_dict()
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(after[key])) for key, value in before.items())
    estimate.load_state_dict(state)
    estimate.load_state_dict({"t": 0})
    assert not estimate.has_begun
