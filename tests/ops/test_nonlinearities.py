"""P-norms and row norms, forward and backward: our C++ for each kind of processor, and torch
operations, against the formula.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ngsgd.models import PNorm, Renormalize
from ngsgd.ops import nonlinearities
from ngsgd.ops.kernels import native
from tests.ops.engines import running

FLOOR = 2.0**-66
LEADING = st.lists(st.integers(1, 5), max_size=2)


def _forget() -> None:
    native.library.cache_clear()
    nonlinearities.load_library.cache_clear()


@pytest.fixture(params=["torch", "AVX512", "AVX2", "none"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the numbers come from."""
    yield from running(request.param, monkeypatch, _forget, lambda: nonlinearities.load_library() is not None)


def assert_close(found: Tensor, wanted: Tensor, atol: float = 1e-6) -> None:
    # sums of at most a few hundred products of numbers near 1 in float32, whose unit is 6e-8
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=atol)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def p_norm_of(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """In float64: (y, dy_j / dx_i for i in group j, 0 where y is)."""
    x64 = x.double().reshape(-1, group)
    y = (x64 * x64).sum(dim=1, keepdim=True).sqrt()
    return y.reshape(*x.shape[:-1], -1), torch.where(y == 0.0, 0.0, x64 / torch.where(y == 0.0, 1.0, y)).reshape(x.shape)


def renormalized(x: Tensor, dY: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """In float64: (y, dY^T dy/dx), a row at a time by the quotient rule."""
    ys, gradients = [], []
    for row, d in zip(x.double().reshape(-1, x.shape[-1]), dY.double().reshape(-1, x.shape[-1]), strict=True):
        mean_square = float(row @ row) / (len(row) * target**2)
        r = max(mean_square, FLOOR) ** -0.5
        ys.append(row * r)
        moves = -(r**3) * float(row @ d) / (len(row) * target**2) if mean_square > FLOOR else 0.0
        gradients.append(d * r + row * moves)
    return torch.stack(ys).view(x.shape), torch.stack(gradients).view(x.shape)


def both_directions(layer: torch.nn.Module, x: Tensor, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dY, dX)."""
    x = x.clone().requires_grad_()
    y = layer(x)
    dY = drawn(*y.shape, seed=seed)
    y.backward(dY)
    assert x.grad is not None
    return y.detach(), dY, x.grad


@settings(max_examples=40, deadline=None)
@given(leading=LEADING, groups=st.integers(1, 40), group=st.integers(1, 12), seed=st.integers(0, 999))
def test_any_p_norm_equals_the_formula(leading: list[int], groups: int, group: int, seed: int) -> None:
    x = drawn(*leading, groups * group, seed=seed)
    y, dY, dX = both_directions(PNorm(group), x)
    wanted, slope = p_norm_of(x, group)
    assert_close(y, wanted)
    assert_close(dX, slope * dY.double().repeat_interleave(group, dim=-1))


@settings(max_examples=40, deadline=None)
@given(leading=LEADING, dim=st.integers(1, 70), target=st.sampled_from([0.5, 1.0, 2.0]), seed=st.integers(0, 999))
def test_any_renormalize_equals_the_formula(leading: list[int], dim: int, target: float, seed: int) -> None:
    x = drawn(*leading, dim, seed=seed)
    y, dY, dX = both_directions(Renormalize(target), x)
    wanted, gradient = renormalized(x, dY, target)
    assert_close(y, wanted)
    # the two parts of a gradient cancel where a row is short: as large as dY times r before
    atol = 1e-5 * float((wanted / x.double()).abs().max() * dY.abs().max())
    assert_close(dX, gradient, atol)


@pytest.mark.parametrize("group", [1, 3, 10, 16])
def test_p_norm_on_every_processor(group: int, engine: str) -> None:
    x = drawn(37, 16 * group)
    x[3], x[5, :group] = 0.0, 0.0
    y, dY, dX = both_directions(PNorm(group), x)
    wanted, slope = p_norm_of(x, group)
    assert_close(y, wanted)
    assert_close(dX, slope * dY.double().repeat_interleave(group, dim=-1))
    assert not dX[3].any()   # as in Kaldi, where torch's own norm has no derivative either


# the floor is a root mean square of 1.2e-10
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e-12, 0.0])
def test_renormalize_on_every_processor(size: float, engine: str) -> None:
    x = size * drawn(23, 131)
    y, dY, dX = both_directions(Renormalize(), x)
    wanted, gradient = renormalized(x, dY, 1.0)
    assert_close(y, wanted)
    assert_close(dX, gradient, 1e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", [PNorm(3), Renormalize()])
def test_non_finite_values_stay_in_their_row(layer: torch.nn.Module, bad: float, engine: str) -> None:
    x = drawn(4, 9)
    x[1, 4] = bad
    y, _, dX = both_directions(layer, x)
    for found in (y, dX):
        assert not found[1].isfinite().all() and found[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("layer", [PNorm(5), Renormalize()])
def test_a_recorded_second_derivative_changes_no_bit_of_the_first_and_is_right(layer: torch.nn.Module, engine: str) -> None:
    x, d = drawn(9, 40), drawn(9, 40, seed=2)
    x[2] = 0.0
    moved = []
    for wide in (x, x.double()):
        leaf = wide.requires_grad_()
        loss = (0.1 * layer(leaf).square()).sin().sum()
        (plain,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (recorded,) = torch.autograd.grad(loss, leaf, create_graph=True)
        assert torch.equal(plain, recorded)   # on which reversing a training run rests
        moved.append(torch.autograd.grad(recorded, leaf, d.to(wide.dtype))[0])
    assert moved[0].isfinite().all()
    # a sum of terms of the size of the row's largest, which cancel in places
    for found, wanted in zip(*moved, strict=True):
        assert_close(found, wanted, 1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("layer", [PNorm(10), Renormalize()])
def test_threads_and_places_in_memory_change_no_bit(layer: torch.nn.Module) -> None:
    before = torch.get_num_threads()
    x = drawn(50, 990)
    shifted = torch.empty(x.numel() + 3)[3:].view(x.shape).copy_(x)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [both_directions(layer, x), both_directions(layer, shifted)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("layer", [PNorm(3), Renormalize()])
def test_columns_with_gaps_derivatives_without_memory_and_no_rows(layer: torch.nn.Module) -> None:
    x = drawn(6, 8).T   # 8 x 6
    torch.testing.assert_close(layer(x), layer(x.contiguous()))
    plain = x.contiguous().requires_grad_()
    layer(plain).sum().backward()   # a derivative of ones that are one number
    again = x.contiguous().requires_grad_()
    layer(again).backward(torch.ones_like(layer(x)))
    assert plain.grad is not None and again.grad is not None
    torch.testing.assert_close(plain.grad, again.grad)
    assert layer(x[:0]).shape == (0, layer(x).shape[1])


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="unflatten"):
        PNorm(4)(torch.randn(2, 6))
