"""The hold-one-out natural gradient against Kaldi's (golden/simple.npz) and against its definition.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ngsgd.errors import DivergenceError
from ngsgd.ops.simple_natural_gradient import column_space, precondition_simple, row_space
from tests.conftest import Golden
from tests.reference.simple_natural_gradient import precondition_by_definition

GOLDEN = Golden("simple.npz")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def rows(num: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows with one strong direction."""
    generator = torch.Generator().manual_seed(seed)
    X_ND = torch.randn(num, dim, generator=generator, dtype=torch.float64)
    X_ND += 3.0 * torch.randn(num, 1, generator=generator, dtype=torch.float64) * torch.ones(dim, dtype=torch.float64)
    return X_ND.to(dtype)


def relative_error(ours: Tensor, reference: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    size = np.linalg.norm(reference)
    return float(np.linalg.norm(ours.double().numpy() - reference) / size) if size else float(ours.abs().max())


@DTYPES
@pytest.mark.parametrize("case", GOLDEN.cases())
def test_equals_kaldi(case: str, dtype: torch.dtype) -> None:
    config = GOLDEN.config(case)
    X = torch.tensor(GOLDEN(case, "X"), dtype=dtype)
    Xbar = precondition_simple(X, config["alpha"])
    assert Xbar.dtype == dtype
    # Kaldi inverts in float32: the vectors' "measured" is up to 2e-6, and 8e-6 where alpha 0.1
    # leaves G badly conditioned
    tolerance = 5e-5 if config["alpha"] == 0.1 else 5e-6
    assert relative_error(Xbar, GOLDEN(case, "Xbar").astype(np.float64)) <= tolerance


def test_every_golden_case_is_compared() -> None:
    assert len(GOLDEN.cases()) == 13


@settings(max_examples=40, deadline=None)
@given(num=st.integers(2, 12), dim=st.integers(1, 12), alpha=st.sampled_from([0.1, 1.0, 4.0, 10.0]), seed=st.integers(0, 10_000))
def test_equals_one_inverse_per_row(num: int, dim: int, alpha: float, seed: int) -> None:
    X = rows(num, dim, seed)
    # both float64: lambda is alpha / (N D) of the trace, so the condition number is at most 1 + N D
    # / ((N - 1) alpha) = 250. The step from all rows to all but one may lose as many digits
    # again: 1e-16 * 250^2
    assert relative_error(precondition_simple(X, alpha), precondition_by_definition(X.numpy(), alpha)) <= 1e-10


@pytest.mark.parametrize(("num", "dim"), [(5, 12), (12, 12), (30, 7), (2, 40)])
def test_the_inverse_over_rows_equals_the_inverse_over_columns(num: int, dim: int) -> None:
    X = rows(num, dim, 0)
    lam = 4.0 / (num * dim) * X.square().sum()
    # the same matrix by two inverses in float64; condition number at most 1 + 84 / 4
    torch.testing.assert_close(row_space(X, lam), column_space(X, lam), rtol=1e-11, atol=1e-12)


@DTYPES
@pytest.mark.parametrize("X", [torch.tensor([[1.0, -2.0, 3.0]]), torch.zeros(4, 3)], ids=["one_row", "zeros"])
def test_one_row_and_zeros_come_back_unchanged_as_a_copy(X: Tensor, dtype: torch.dtype) -> None:
    X = X.to(dtype)
    Xbar = precondition_simple(X)
    assert torch.equal(Xbar, X)
    assert Xbar.data_ptr() != X.data_ptr()


@DTYPES
@pytest.mark.parametrize(("num", "dim"), [(20, 6), (6, 20), (2, 2), (2, 1)])
def test_the_norm_is_kept_and_the_input_is_not_modified(num: int, dim: int, dtype: torch.dtype) -> None:
    X = rows(num, dim, 1, dtype)
    before = X.clone()
    Xbar = precondition_simple(X)
    assert torch.equal(X, before)
    # one rounding to float32 per element, from float64 within
    assert float(Xbar.norm()) == pytest.approx(float(X.norm()), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("num", "dim"), [(6, 3), (3, 6), (1, 3)])
def test_rows_that_are_not_finite_raise(num: int, dim: int, bad: float) -> None:
    X = rows(num, dim, 2)
    X[0, 1] = bad
    with pytest.raises(DivergenceError, match="not finite"):
        precondition_simple(X)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_alpha_that_leaves_the_fisher_matrix_singular_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="Invalid alpha"):
        precondition_simple(rows(4, 3, 3), alpha)


@DTYPES
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e8])
@pytest.mark.parametrize("kind", ["plain", "duplicates", "rank_1", "one_direction_each", "one_row_of_values"])
@pytest.mark.parametrize(("num", "dim"), [(12, 5), (5, 12)])
def test_badly_scaled_and_degenerate_rows_stay_finite(num: int, dim: int, kind: str, scale: float, dtype: torch.dtype) -> None:
    X = rows(num, dim, 4)
    if kind == "duplicates":
        X = X[:1].repeat(num, 1)
    elif kind == "rank_1":
        X = X[:, :1] * X[:1]
    elif kind == "one_direction_each":
        X = torch.eye(num, dim, dtype=X.dtype)
    elif kind == "one_row_of_values":
        X[1:] = 0.0
    X = (scale * X).to(dtype)
    Xbar = precondition_simple(X, 0.1)
    assert bool(torch.isfinite(Xbar).all())
    # one rounding per element
    assert float(Xbar.double().norm()) == pytest.approx(float(X.double().norm()), rel=1e-6)


def test_a_scale_of_the_rows_is_a_scale_of_the_result() -> None:
    X = rows(12, 5, 5)
    # exact
    torch.testing.assert_close(precondition_simple(2.0**10 * X), 2.0**10 * precondition_simple(X), rtol=1e-12, atol=0.0)
