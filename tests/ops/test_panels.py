"""Weight gradients from rows in panels, against the formula in float64, torch's products and Kaldi.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.ops import fisher_projection, packed_gemm
from ngsgd.ops.kernels import native
from ngsgd.ops.packed_gemm import LowRankCorrection, PackedMatrix
from tests.optim import test_train_golden

NAN = float("nan")


@pytest.fixture(autouse=True)
def compiled() -> None:
    if packed_gemm.load_library() is None:
        pytest.skip("no C++ compiler here, or a processor without AVX-512: a library makes all products")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes and the maker of the processor."""
    monkeypatch.setattr(packed_gemm, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(packed_gemm, "MANY_ROWS", 0)
    monkeypatch.setattr(packed_gemm, "is_faster", lambda: True)


def in_panels(rows_ND: Tensor, room: int = 0) -> PackedMatrix:
    memory = torch.full((packed_gemm.size(len(rows_ND) + room, rows_ND.shape[1]),), NAN)
    made = PackedMatrix.over(memory, len(rows_ND), rows_ND.shape[1], room)
    made.fill(rows_ND)
    return made


# below, at and above what one tile, panel, chunk of panels and stretch of rows hold
SHAPES = [(1, 1, 1), (5, 8, 49), (24, 7, 48), (130, 250, 17), (513, 100, 33), (800, 500, 97)]


@pytest.mark.parametrize("lie_in_panels", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_equals_the_formula(shape: tuple[int, int, int], lie_in_panels: bool) -> None:
    num, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    Y_NO, X_NI, one_N, H_NR, W_RO = (torch.randn(size, generator=generator)
                                     for size in ((num, outputs), (num, inputs), (num,), (num, 7), (7, outputs)))
    dY, X = in_panels(Y_NO) if lie_in_panels else Y_NO, in_panels(X_NI, room=7)
    assert torch.equal(X.rows(), X_NI)
    Y64_NO, X64_NI, one64_N = Y_NO.double(), X_NI.double(), one_N.double()

    def assert_close(found: Tensor | None, wanted: Tensor) -> None:
        # sums of N numbers near 1, and near R with the correction, in float32, whose unit is 6e-8
        assert found is not None
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-6 * num)

    dW_OI, none = packed_gemm.product(dY, X, 0.5)
    assert none is None and dW_OI.is_contiguous()
    assert_close(dW_OI, 0.5 * Y64_NO.T @ X64_NI)
    same_OI, db_O = packed_gemm.product(dY, X, 0.5, one_N)
    assert torch.equal(same_OI, dW_OI)
    assert_close(db_O, 0.5 * Y64_NO.T @ one64_N)

    dW_OI, db_O = packed_gemm.product(dY, X, 0.5, one_N, LowRankCorrection(H_NR, W_RO))
    Yhat64_NO = Y64_NO - H_NR.double() @ W_RO.double()
    assert_close(dW_OI, 0.5 * Yhat64_NO.T @ X64_NI)
    assert_close(db_O, 0.5 * Yhat64_NO.T @ one64_N)


def test_derivatives_between_others_in_memory_are_read_in_place() -> None:
    wide = torch.full((60, 100), NAN)
    wide[:, :70] = torch.randn(60, 70, generator=torch.Generator().manual_seed(1))
    Y_NO, X_NI = wide[:, :50], torch.randn(60, 20, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(packed_gemm.product(Y_NO, in_panels(X_NI), 1.0)[0], Y_NO.T @ X_NI)


def test_threads_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    Y_NO, X_NI, one_N = (torch.randn(size, generator=generator) for size in ((900, 700), (900, 150), (900,)))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            found.append(packed_gemm.product(Y_NO, in_panels(X_NI), 1.0, one_N))
    finally:
        torch.set_num_threads(before)
    for dW_OI, db_O in found:
        assert db_O is not None and found[0][1] is not None
        assert torch.equal(dW_OI, found[0][0]) and torch.equal(db_O, found[0][1])


# D below, at and above a panel, with complete vectors and a rest; W larger than the cache, which is
# met a part at a time
@pytest.mark.parametrize("shape", [(30, 20, 4), (49, 48, 8), (50, 97, 7), (25, 333, 20), (55, 8195, 40)])
@pytest.mark.parametrize("engine", ["C++", "torch"])
def test_preconditioned_rows_in_panels_are_those_kept_by_rows(shape: tuple[int, int, int], engine: str) -> None:
    N, D, R = shape
    generator = torch.Generator().manual_seed(4)
    X_ND, W_RD, one_N = (torch.randn(size, generator=generator) for size in ((N, D), (R, D + 1), (N,)))
    memory = PackedMatrix.over(torch.full((packed_gemm.size(N + 3, D),), NAN), N, D, 3)

    def both() -> tuple[fisher_projection.Projection, fisher_projection.Projection]:
        return fisher_projection.project(X_ND, W_RD, one_N), fisher_projection.project(X_ND, W_RD, one_N, memory)

    if engine == "torch":
        with native.in_torch_operations():
            by_rows, projection = both()
    else:
        by_rows, projection = both()
    assert projection.Xhat_ND is memory
    assert isinstance(by_rows.Xhat_ND,
                      Tensor) and by_rows.one_hat_N is not None and projection.one_hat_N is not None
    assert torch.equal(memory.rows(), by_rows.Xhat_ND)
    assert torch.equal(projection.H_NR, by_rows.H_NR) and torch.equal(projection.one_hat_N,
                                                                      by_rows.one_hat_N)
    assert (projection.sum_sq, projection.sum_sq_hat) == (by_rows.sum_sq, by_rows.sum_sq_hat)


def trained(num_steps: int, num_outputs: int, *, bias: bool, **options: float | bool) -> list[Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(60, 50, bias=bias), nn.Tanh(), nn.Linear(50, num_outputs, bias=bias))
    optimizer = NGSGD(model, lr=1e-3, rank_in=5, rank_out=9, **options)  # type: ignore[arg-type]
    for _ in range(num_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(64, 60)), torch.randint(num_outputs, (64,)), reduction="sum").backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# 2000 outputs: the correction of the derivatives is taken off the product
@pytest.mark.parametrize("num_outputs", [40, 2000])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_in_panels_are_those_of_torch(num_outputs: int, bias: bool, always: None,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    product, corrections = packed_gemm.product, set()

    def watched(*args: Any) -> tuple[Tensor, Tensor | None]:
        corrections.add(args[4:] not in ((), (None,)))
        return product(*args)

    monkeypatch.setattr(packed_gemm, "product", watched)
    found = trained(3, num_outputs, bias=bias)
    assert corrections == ({False} if num_outputs == 40 else {False, True})
    with native.in_torch_operations():
        wanted = trained(3, num_outputs, bias=bias)
    assert len(found) == len(wanted) == (4 if bias else 2)
    for a, b in zip(found, wanted, strict=True):
        # float32 through three steps, each of which feeds its rounding to the next estimate
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
    assert bias or not torch.equal(found[0], wanted[0])


def test_masked_rows_and_rows_without_an_estimate(always: None) -> None:
    for mask in (0, 64):
        torch.manual_seed(6)
        layer, x = nn.Linear(30, 60), torch.randn(64, 30)
        _optimizer = NGSGD(layer, lr=1e-3, ignore_zero_rows=True)
        weights = torch.ones(64)
        weights[:mask] = 0.0   # all of them: nothing to start an estimate from
        (layer(x) * weights[:, None]).square().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()
        assert bool(layer.weight.grad.any()) == (mask == 0)


def test_the_limit_per_sample_counts_rows(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_gemm, "product", None)
    assert trained(2, 40, bias=True, max_change_per_sample=0.01)[0].isfinite().all()


def test_who_multiplies_is_decided_by_processor_types_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small, few = torch.ones(256, 512), torch.ones(16, 16), torch.ones(100, 512)
    monkeypatch.setattr(packed_gemm, "is_faster", lambda: True)
    assert packed_gemm.should_use(large, large) and not packed_gemm.should_use(small, small)
    assert not packed_gemm.should_use(few, few) and packed_gemm.should_use(torch.ones(100, 2048),
                                                                           few)
    assert not packed_gemm.should_use(large.double(), large.double())
    assert not packed_gemm.should_use(large.bfloat16(), large.bfloat16())
    with native.in_torch_operations():
        assert not packed_gemm.should_use(large, large)
    monkeypatch.setattr(packed_gemm, "is_faster", lambda: False)
    assert not packed_gemm.should_use(large, large)
    monkeypatch.undo()
    packed_gemm.is_faster.cache_clear()
    monkeypatch.setattr(native, "is_made_by", lambda vendor: vendor == "AuthenticAMD")
    try:
        assert not packed_gemm.should_use(large, large)   # ngsgd.ops.gemm has the faster one there
    finally:
        packed_gemm.is_faster.cache_clear()


@pytest.mark.parametrize("case", test_train_golden.GOLDEN.cases())
def test_kaldis_training(case: str, always: None) -> None:
    test_train_golden.test_trajectory_equals_kaldi(case, torch.float32)
