"""Projection of rows onto an estimate: C++ in each vector width and torch operations, against the
formula in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ngsgd import OnlineNaturalGradient
from ngsgd.errors import NgsgdWarning
from ngsgd.ops import fisher_projection
from ngsgd.ops.kernels import native
from tests import compilers
from tests.ops.engines import running
from tests.optim import test_online_golden, test_train_golden


def _forget() -> None:
    native.library.cache_clear()
    fisher_projection.load_library.cache_clear()
    fisher_projection.workspace_size.cache_clear()


@pytest.fixture(params=["torch", "AVX512", "AVX2"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What makes the products."""
    yield from running(request.param, monkeypatch, _forget, fisher_projection.is_native)


@pytest.fixture
def compiled() -> None:
    if not fisher_projection.is_native():
        pytest.skip("no C++ compiler here, or a processor that the C++ was not written for")


def drawn(num: int, dim: int, rank: int, *, bias: bool, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    X_ND = torch.randn(num, dim, generator=generator)
    W_RD = torch.randn(rank, dim + bias, generator=generator) / dim**0.5
    return X_ND, W_RD, torch.randn(num, generator=generator) if bias else None


def expected(X_ND: Tensor, W_RD: Tensor, one_N: Tensor | None) -> dict[str, Tensor]:
    X64_ND = X_ND.double() if one_N is None else torch.cat([X_ND, one_N[:, None]], dim=1).double()
    W64_RD = W_RD.double()
    H_NR = X64_ND @ W64_RD.T
    Xhat_ND = X64_ND - H_NR @ W64_RD
    found = {"H": H_NR, "Xhat": Xhat_ND[:, :X_ND.shape[1]], "sum_sq": X64_ND.square().sum(), "sum_sq_hat": Xhat_ND.square().sum()}
    return found if one_N is None else {**found, "one_hat": Xhat_ND[:, -1]}


def got(projection: fisher_projection.Projection) -> dict[str, Tensor]:
    named: dict[str, Any] = {"H": projection.H_NR, "Xhat": projection.Xhat_ND,
                             "sum_sq": projection.sum_sq, "sum_sq_hat": projection.sum_sq_hat,
                             "one_hat": projection.one_hat_N}
    return {name: torch.as_tensor(x).double() for name, x in named.items() if x is not None}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        # sums of D and of R products of numbers near 1 in float32, whose unit is 6e-8: a few
        # hundred of them at worst
        torch.testing.assert_close(found[name], x, rtol=2e-5, atol=2e-5)


# by fours, vectors of 8 and 16, panels of 24 and 48 and the rest; tiles of 1 to 24 rows,
# groups of up to 40; any rank
SHAPES = [(1, 2, 1), (5, 7, 3), (24, 16, 8), (25, 17, 4), (48, 300, 20), (50, 15, 7), (47, 33, 5), (130, 360, 20), (512, 48, 23),
          (75, 96, 11), (41, 131, 1),
          # W of middling size: as it lies if it lies well, which the last does not
          (55, 512, 70), (31, 1040, 66), (50, 1000, 80)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_part_equals_the_formula(shape: tuple[int, int, int], bias: bool, engine: str) -> None:
    X_ND, W_RD, one_N = drawn(*shape, bias=bias, seed=0)
    before = X_ND.clone(), W_RD.clone()
    wanted = expected(X_ND, W_RD, one_N)
    assert_close(got(fisher_projection.project(X_ND, W_RD, one_N)), wanted)
    scratch = torch.full_like(X_ND, torch.nan)
    assert_close(got(fisher_projection.project(X_ND, W_RD, one_N, scratch)), wanted)
    without = fisher_projection.project(X_ND, W_RD, one_N, corrects=False)
    assert_close(got(without), {name: wanted[name] for name in ("H", "sum_sq")})
    assert_close(got(fisher_projection.with_residual(without, X_ND, W_RD, one_N)), wanted)
    assert torch.equal(X_ND, before[0]) and torch.equal(W_RD, before[1])


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 60), dim=st.integers(2, 70), rank=st.integers(1, 30), bias=st.booleans(), seed=st.integers(0, 1000))
def test_any_shape_equals_the_formula(num: int, dim: int, rank: int, bias: bool, seed: int) -> None:
    X_ND, W_RD, one_N = drawn(num, dim, rank, bias=bias, seed=seed)
    assert_close(got(fisher_projection.project(X_ND, W_RD, one_N)), expected(X_ND, W_RD, one_N))


@pytest.mark.parametrize("bias", [False, True])
# the last two: parts without remainder, so the appended column is one
@pytest.mark.parametrize("dim", [8195, 9 * 960, 9 * 984])
def test_an_estimate_larger_than_the_cache_is_met_a_part_at_a_time(dim: int, bias: bool, engine: str) -> None:
    X_ND, W_RD, one_N = drawn(55, dim, 40, bias=bias, seed=1)
    assert len(W_RD) * X_ND.shape[1] > 3 << 16
    assert_close(got(fisher_projection.project(X_ND, W_RD, one_N)), expected(X_ND, W_RD, one_N))


def test_threads_change_no_bit(compiled: None) -> None:
    before = torch.get_num_threads()
    for shape, bias in (((130, 100, 20), True), ((200, 512, 80), False), ((700, 3000, 90), True)):
        X_ND, W_RD, one_N = drawn(*shape, bias=bias, seed=2)
        found = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(got(fisher_projection.project(X_ND, W_RD, one_N)))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


@pytest.mark.parametrize("shape", [(48, 300, 20), (55, 512, 70), (31, 1040, 66), (55, 8192, 40)])
def test_where_numbers_lie_in_memory_changes_no_bit(shape: tuple[int, int, int], engine: str) -> None:
    X_ND, W_RD, _ = drawn(*shape, bias=False, seed=6)
    wanted = got(fisher_projection.project(X_ND, W_RD))
    # our C++ takes any address; with several threads MKL's dot product divides its work at
    # multiples of 16 bytes, the least that the allocators of C, NumPy and torch return
    shift = 4 if engine == "torch" else 3
    shifted = [torch.empty(x.numel() + shift)[shift:].view(x.shape).copy_(x) for x in (X_ND, W_RD)]
    found = got(fisher_projection.project(*shifted))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rows_that_are_not_finite_show(engine: str) -> None:
    for bad in (float("nan"), float("inf"), 1e25):
        X_ND, W_RD, _ = drawn(30, 40, 6, bias=False, seed=3)
        X_ND[17, 39] = bad
        projection = fisher_projection.project(X_ND, W_RD)
        assert not torch.as_tensor(projection.sum_sq).float().isfinite()
        assert isinstance(projection.Xhat_ND, Tensor)
        assert projection.Xhat_ND[:17].isfinite().all() and projection.Xhat_ND[18:].isfinite().all()


def test_other_types_layouts_and_gradients_are_left_to_torch(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    X_ND, W_RD, _ = drawn(30, 40, 6, bias=False, seed=4)

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the C++ was called: {name}")

    monkeypatch.setattr(fisher_projection, "load_library", Refusing)
    assert fisher_projection.project(X_ND.double(), W_RD.double()).H_NR.dtype == torch.float64
    assert fisher_projection.project(X_ND[:0], W_RD).H_NR.shape == (0, 6)
    columns = W_RD.T.contiguous().T
    torch.testing.assert_close(fisher_projection.project(X_ND, columns).H_NR, X_ND @ W_RD.T)
    leaf = X_ND.clone().requires_grad_()
    Xhat = fisher_projection.project(leaf, W_RD).Xhat_ND
    assert isinstance(Xhat, Tensor) and Xhat.requires_grad
    with pytest.raises(AssertionError, match="was called"):
        fisher_projection.project(X_ND, W_RD)


def test_an_estimate_between_others_in_memory_is_met_in_place(compiled: None) -> None:
    X_ND, W_RD, _ = drawn(30, 40, 6, bias=False, seed=5)
    wide = torch.cat([W_RD, torch.full((6, 3), torch.nan)], dim=1)
    assert_close(got(fisher_projection.project(X_ND, wide[:, :40])), expected(X_ND, W_RD, None))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_operations_are_used(compiler: str, tmp_path: Path) -> None:
    with compilers.only(Path(compiler), tmp_path):
        if native.capability() in fisher_projection.PROCESSORS:
            with pytest.warns(NgsgdWarning):
                assert not fisher_projection.is_native()
        Xhat, scale = OnlineNaturalGradient(2).precondition(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)))
        assert Xhat.isfinite().all() and scale > 0
        assert not list(tmp_path.rglob("*.so*"))


@pytest.mark.parametrize("case", [case for case in test_online_golden.CASES if test_online_golden.GOLDEN.has(case, "init_W")])
def test_kaldis_preconditioner(case: str, engine: str) -> None:
    test_online_golden.test_from_kaldis_start(case, torch.float32)


@pytest.mark.parametrize("case", test_train_golden.GOLDEN.cases())
def test_kaldis_training(case: str, engine: str) -> None:
    test_train_golden.test_trajectory_equals_kaldi(case, torch.float32)
