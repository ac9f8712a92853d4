"""Products by oneDNN and by MKL against float64, and Kaldi's vectors with oneDNN for products of
any size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ngsgd import NGSGD
from ngsgd.ops import gemm
from ngsgd.ops.kernels import native
from tests.optim import test_online_golden, test_train_golden

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by rows": lambda x: x.contiguous(),
    "by columns": lambda x: x.T.contiguous().T,
    "with gaps": lambda x: torch.cat([x, x], dim=1)[:, :x.shape[1]],
    "one row repeated": lambda x: x[:1].expand(len(x), -1),
}


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of any size by oneDNN, as large ones are on some processors."""
    if not gemm.is_there():
        pytest.skip("this torch has no oneDNN, so MKL or what stands for it makes all products")
    monkeypatch.setattr(gemm, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(gemm, "is_faster", lambda: True)
    with native.in_torch_operations():
        yield


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in a product of 40 rows."""
    monkeypatch.setattr(gemm, "BLOCK_ROWS", 16)


class Calls(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def num_onednn(self) -> int:
        return sum("_linear_pointwise" in name for name in self.names)


def check_products(left: str, right: str) -> None:
    torch.manual_seed(0)
    a, b, c = LAYOUTS[left](torch.randn(40, 30)), LAYOUTS[right](torch.randn(30, 50)), torch.randn(40, 50)
    exact = a.double() @ b.double()
    # 30 terms of size one, rounded in float32
    close = partial(torch.testing.assert_close, rtol=0.0, atol=1e-5)
    close(gemm.mm(a, b).double(), exact)
    out = torch.zeros(40, 51)[:, :-1]
    assert gemm.mm(a, b, out=out) is out
    close(out.double(), exact)
    close(gemm.sub_matmul(c, a, b, torch.empty(40, 50)).double(), c.double() - exact)
    for factor in (a, 2.0 * torch.cat([a, a])):   # the sign goes to either side
        ones = torch.ones(len(factor), 50)   # in place
        exact_there = 1.0 - factor.double() @ b.double()
        torch.testing.assert_close(gemm.sub_matmul(ones, factor, b, ones).double(), exact_there,
                                   rtol=0.0, atol=1e-4)
        torch.testing.assert_close(ones.double(), exact_there, rtol=0.0, atol=1e-4)
    bias = torch.randn(50)
    wanted = exact + bias.double()
    close(gemm.linear(a, b.T, bias).double(), wanted)
    close(gemm.linear(a.reshape(4, 10, 30), b.T, bias).double(), wanted.view(4, 10, 50))


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_products_of_onednn(left: str, right: str, onednn: None, blocks: None) -> None:
    with Calls() as calls:
        check_products(left, right)
    assert calls.num_onednn == 1 + 3 + 1 + 3 + 5 + 2


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_products_of_torch(left: str, right: str, onednn: None) -> None:
    with torch.backends.mkldnn.flags(enabled=False), Calls() as calls:
        check_products(left, right)
    assert calls.num_onednn == 0


def test_gemms_unsupported_by_onednn_use_torch(onednn: None) -> None:
    a = torch.randn(4, 3, requires_grad=True)
    gemm.mm(a, torch.randn(3, 2)).sum().backward()   # oneDNN's product has no derivative here
    assert a.grad is not None
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(4, 3, dtype=dtype)
        with Calls() as calls:
            assert torch.equal(gemm.mm(x, x.T), x @ x.T)
            assert torch.equal(gemm.sub_matmul(x @ x.T, x, x.T),
                               torch.addmm(x @ x.T, x, x.T, alpha=-1))
            assert torch.equal(gemm.linear(x, x, None), nn.functional.linear(x, x))
        assert calls.num_onednn == 0


def test_memory_first_kept_in_inference_mode_serves_training_too(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "thread_buffers", threading.local())
    a, b = torch.randn(30, 40).T, torch.cat([torch.randn(30, 50)] * 2, dim=1)[:, :50]
    with torch.inference_mode():
        gemm.mm(a, b)
    torch.testing.assert_close(gemm.mm(a, b), a @ b)


def test_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "is_faster", lambda: True)
    with Calls() as calls:
        gemm.mm(torch.ones(64, 64), torch.ones(64, 64))
    assert calls.num_onednn == 0


def test_a_layer_of_the_natural_gradient_takes_it_for_all_its_products(onednn: None) -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20))
    optimizer = NGSGD(model, 1e-3)
    x, y = torch.randn(16, 30), torch.randint(20, (16,))

    def step() -> None:
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step(num_samples=16)

    for _ in range(11):   # whose estimates move at every call
        step()
    with Calls() as calls:
        step()
    # of two layers the forward pass, the gradient, rows there and back on both sides; of one the
    # input derivative
    assert calls.num_onednn == 2 * (1 + 1 + 4) + 1
    assert not any(name.startswith(("aten.mm.", "aten.addmm.")) for name in calls.names)


@pytest.mark.parametrize("case", [case for case in test_online_golden.CASES if test_online_golden.GOLDEN.has(case, "init_W")])
def test_kaldis_preconditioner(case: str, onednn: None) -> None:
    test_online_golden.test_from_kaldis_start(case, torch.float32)


@pytest.mark.parametrize("case", test_train_golden.GOLDEN.cases())
def test_kaldis_training(case: str, onednn: None) -> None:
    test_train_golden.test_trajectory_equals_kaldi(case, torch.float32)


@pytest.mark.entry("F18")
@pytest.mark.parametrize("size", [9, 1500])
def test_a_result_of_another_shape_is_refused_and_not_resized(size: int) -> None:
    """Torch resizes a result that is also an argument, and reads the new memory."""
    x = torch.randn(16, size)
    for total in (torch.eye(4), torch.eye(size + 3), torch.ones(1, 1)):
        before = total.clone()
        for call in (partial(gemm.add_mm, total, x.T, x, keep=0.5, scale=1.0), partial(gemm.mm, x.T, x, out=total),
                     partial(gemm.sub_matmul, total, x.T, x, total)):
            with pytest.raises(ValueError, match="Invalid result"):
                call()
        assert torch.equal(total, before)
    total = torch.eye(size)
    gemm.add_mm(total, x.T, x, keep=0.5, scale=1.0)
    torch.testing.assert_close(total, 0.5 * torch.eye(size) + x.T @ x, rtol=1e-4, atol=1e-3)
