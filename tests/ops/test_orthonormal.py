"""The constraint of semi-orthogonal layers against a slow float64 version, and where it leads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ngsgd.ops.orthonormal import constrain_orthonormal
from tests.reference.orthonormal import deviation, one_step

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
SHAPES = pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 6), (6, 1)], ids=str)


def orthonormal(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Orthonormal rows, or columns if they are fewer."""
    generator = torch.Generator().manual_seed(seed)
    Q: Tensor = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64))[0]
    return Q if rows > columns else Q.T


def near_orthonormal(rows: int, columns: int, spread: float, seed: int = 0) -> Tensor:
    """Singular values in 1 - spread .. 1 + spread."""
    k = min(rows, columns)
    sigma = torch.linspace(1.0 - spread, 1.0 + spread, k, dtype=torch.float64) if k > 1 else torch.tensor([1.0 + spread]).double()
    return orthonormal(rows, k, seed) @ (sigma[:, None] * orthonormal(k, columns, seed + 1))


def constrained(weight: Tensor, scale: float) -> Tensor:
    weight = weight.clone(memory_format=torch.contiguous_format)
    constrain_orthonormal(weight, scale)
    return weight


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 10), columns=st.integers(1, 10), scale=st.sampled_from([1.0, 0.3, 2.5, -1.0]),
       spread=st.floats(0.0, 0.5), seed=st.integers(0, 10_000))
def test_one_step_equals_the_reference(rows: int, columns: int, scale: float, spread: float, seed: int) -> None:
    weight = abs(scale) * near_orthonormal(rows, columns, spread, seed)
    # both float64, a few sums over 10 elements
    np.testing.assert_allclose(constrained(weight, scale).numpy(), one_step(weight.numpy(), scale), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("spread", "share"), [(0.05, 1.0), (0.12, 0.5), (0.3, 0.25)])
def test_a_floating_scale_goes_slower_where_singular_values_differ(spread: float, share: float) -> None:
    weight = near_orthonormal(8, 20, spread)
    sigma_sq = torch.linalg.svdvals(weight).square()
    ratio = float(sigma_sq.square().sum() * 8 / sigma_sq.sum() ** 2)
    # each of the three speeds is met
    assert (ratio > 1.02, ratio > 1.1) == (share < 1.0, share < 0.5), ratio
    P = weight @ weight.T
    scale_sq = P.square().sum() / P.trace()
    expected = weight - 0.5 * share * (P / scale_sq - torch.eye(8).double()) @ weight
    # both float64
    torch.testing.assert_close(constrained(weight, -1.0), expected, rtol=1e-12, atol=1e-14)


@SHAPES
@DTYPES
@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0])
def test_repeated_steps_lead_to_singular_values_of_the_fixed_scale(shape: tuple[int, int], scale: float,
                                                                   dtype: torch.dtype) -> None:
    weight = (scale * near_orthonormal(*shape, 0.4)).to(dtype)
    for _ in range(8):  # quadratic: 0.4, 0.27, 0.1, 0.015, 3e-4, 2e-7, ..
        constrain_orthonormal(weight, scale)
    # what one product of 9 elements rounds to
    assert deviation(weight.double().numpy(), scale) <= (1e-6 if dtype == torch.float32 else 1e-14)
    short = weight if shape[0] <= shape[1] else weight.T
    eye = scale**2 * torch.eye(len(short), dtype=dtype)
    torch.testing.assert_close(short @ short.T, eye, rtol=0.0, atol=float(scale**2 * (2e-6 if dtype == torch.float32 else 1e-14)))


@SHAPES
@DTYPES
def test_repeated_steps_with_a_floating_scale_lead_to_equal_singular_values_of_about_the_same_size(
        shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (3.0 * near_orthonormal(*shape, 0.4)).to(dtype)
    norm = float(weight.norm())
    for _ in range(40):  # slow at first, a quarter of the speed
        constrain_orthonormal(weight, -1.0)
    # float32: rounding of one product
    assert deviation(weight.double().numpy(), -1.0) <= (1e-6 if dtype == torch.float32 else 1e-14)
    # it floats: the singular values met at their own size
    assert 0.9 * norm < float(weight.norm()) < 1.1 * norm


def test_a_floating_scale_does_not_see_the_size() -> None:
    weight = near_orthonormal(4, 9, 0.3)
    # multiplied by a power of two: exact in float64
    assert torch.equal(constrained(1024.0 * weight, -1.0), 1024.0 * constrained(weight, -1.0))


@SHAPES
@DTYPES
@pytest.mark.parametrize("scale", [2.0, -1.0])
def test_a_weight_that_fulfils_the_constraint_is_left_alone(shape: tuple[int, int], scale: float, dtype: torch.dtype) -> None:
    weight = (2.0 * orthonormal(*shape)).to(dtype)
    # the step is 1/2 of the rounding of P
    torch.testing.assert_close(constrained(weight, scale), weight, rtol=0.0, atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_an_exact_identity_does_not_change_a_bit() -> None:
    for scale in (1.0, -1.0):
        assert torch.equal(constrained(torch.eye(4, 9), scale), torch.eye(4, 9))


def test_dimensions_behind_the_first_are_taken_together() -> None:
    weight = near_orthonormal(3, 12, 0.3)
    assert torch.equal(constrained(weight.view(3, 2, 3, 2), 1.0).view(3, 12), constrained(weight, 1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_comes_as_near_as_its_digits_allow(dtype: torch.dtype) -> None:
    weight = near_orthonormal(4, 9, 0.4).to(dtype)
    for _ in range(10):
        constrain_orthonormal(weight, 1.0)
    # 9 elements of half a unit in the last place, 2^-9 or 2^-12, and the step stops where it rounds
    # to nothing
    assert deviation(weight.double().numpy(), 1.0) <= (2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("scale", [1.0, -1.0])
@SHAPES
def test_zeros_stay_zeros(shape: tuple[int, int], scale: float) -> None:
    assert torch.equal(constrained(torch.zeros(shape), scale), torch.zeros(shape))


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_weight_that_is_not_finite_or_overflows_is_left_as_it_was(bad: float, scale: float) -> None:
    weight = near_orthonormal(4, 9, 0.3).float()
    weight[1, 2] = bad
    before = weight.clone()
    constrain_orthonormal(weight, scale)
    torch.testing.assert_close(weight, before, rtol=0.0, atol=0.0, equal_nan=True)
