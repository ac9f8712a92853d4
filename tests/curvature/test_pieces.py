"""Parts with a separate fast implementation, and work in pieces instead of in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect, losses
from ngsgd.curvature.forms import grad_forms, kronecker
from ngsgd.curvature.forms.grad_forms import DenseInputs, OuterProduct, Patches
from ngsgd.curvature.graph import vector_products
from tests.curvature.support import close


@pytest.mark.parametrize("chunk", [1, 1 << 22])   # a sample at a time, and all at once
@pytest.mark.parametrize(("shape", "kernel", "stride", "dilation", "padding"), [
    ((3, 4, 11), (3,), (1,), (2,), (0,)),
    # one output: windows that have nothing in common
    ((3, 4, 7), (3,), (1,), (3,), (0,)),
    ((3, 4, 6), (4,), (1,), (1,), (2,)),
    ((3, 2, 6, 7), (3, 2), (1, 2), (1, 2), (1, 0)),
    ((3, 2, 5, 6), (2, 3), (1, 1), (2, 1), (0, 1)),
    ((2, 2, 4, 5, 4), (2, 1, 3), (1, 2, 1), (1, 1, 1), (1, 0, 1))])
def test_the_moment_of_patches_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...],
                                                                   kernel: tuple[int, ...], stride: tuple[int, ...],
                                                                   dilation: tuple[int, ...], padding: tuple[int, ...],
                                                                   chunk: int) -> None:
    monkeypatch.setattr(kronecker, "_CHUNK", chunk)
    torch.manual_seed(0)
    inputs = Patches(torch.randn(shape).double(), kernel, stride, dilation, [(side, side) for side in padding], shape[0])
    a_XI = inputs.rows(0, shape[0]).flatten(0, 1)
    total = kronecker.Gram()
    num_rows, moment_II = kronecker.add_inputs(total, inputs, "expand"), total.total()
    close(moment_II, a_XI.T @ a_XI)
    assert num_rows == len(a_XI)


@pytest.mark.parametrize("logits", [[0.3, -1.0, 2.0, 0.0], [50.0, 0.0, -80.0, 1.0], [0.0, -800.0, -900.0, 0.0],
                                    [-900.0, 0.0, -1e4, -1e4]])
def test_the_columns_of_cross_entropy_are_a_root_also_where_probabilities_underflow(logits: list[float]) -> None:
    f_NC = torch.tensor([logits]).double()
    _, call = losses.arguments(nn.functional.cross_entropy, (f_NC, torch.tensor([0])), {"reduction": "sum"})
    view = call.evaluation(f_NC, torch.tensor(1.0))
    root_VC = torch.cat(list(view.columns(1, 2)))[:, 0]
    p_C = f_NC[0].softmax(dim=0)
    assert len(root_VC) == 3 and bool(root_VC.isfinite().all())
    close(root_VC.T @ root_VC, torch.diag(p_C) - torch.outer(p_C, p_C))


def test_classes_without_probability_are_never_drawn() -> None:
    p_RC = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    y_RM = losses._drawn(p_RC, 1000, torch.Generator().manual_seed(0))
    assert set(y_RM[0].tolist()) == {1, 3} and set(y_RM[1].tolist()) == {4} and set(y_RM[2].tolist()) == {0}


# a vector of a sample at a time; three of them; all at once
@pytest.mark.parametrize("chunk", [1, 40, 1 << 19])
@pytest.mark.parametrize("signed", [False, True])
# short rows, and long ones that are squared one by one
@pytest.mark.parametrize("width", [4, 1400])
def test_squares_of_many_vectors_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch, chunk: int, signed: bool,
                                                             width: int) -> None:
    monkeypatch.setattr(grad_forms, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    e_VNTO = torch.randn(7, 3, 5, 3, generator=generator).double()
    a_NTI = torch.randn(3, 5, width, generator=generator).double()
    signs_VN = torch.randint(-1, 2, (7, 3), generator=generator).double() if signed else None
    weights_VN = torch.ones(7, 3).double() if signs_VN is None else signs_VN
    expected_NP = torch.einsum("vn,vnoi->noi", weights_VN, torch.einsum("vnto,nti->vnoi", e_VNTO, a_NTI).square()).flatten(1)
    share = OuterProduct(DenseInputs(a_NTI), e_VNTO)
    close(share.squares_by_sample(signs_VN), expected_NP)
    close(share.sum_of_squares(signs_VN), expected_NP.sum(dim=0))


class _Doubled(torch.autograd.Function):
    """Not to be batched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> Tensor:
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError("no rule for batches")
        return 2.0 * e


@pytest.mark.parametrize("at_once", [1, 4, 6])
@pytest.mark.parametrize("can_be_batched", [True, False])
def test_vectors_at_once_are_vectors_one_by_one(can_be_batched: bool, at_once: int) -> None:
    torch.manual_seed(0)
    x, unused = torch.randn(3, 4, requires_grad=True), torch.randn(2, requires_grad=True).exp()
    h = torch.tanh(x)
    doubled: Any = _Doubled.apply(h)  # type: ignore[no-untyped-call]
    f = (h if can_be_batched else doubled) @ torch.randn(4, 5)
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in (h, unused)]
    vectors_V = torch.randn(6, 3, 5)
    of_h, of_unused = vector_products(f, edges, vectors_V, at_once)
    assert of_unused is None and of_h is not None
    # float32, sums of 5 products
    torch.testing.assert_close(of_h, torch.stack([torch.autograd.grad(f, h, v, retain_graph=True)[0] for v in vectors_V]),
                               rtol=1e-5, atol=1e-6)


def test_an_error_on_the_way_of_vectors_is_raised() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    f = x.exp()
    edge = torch.autograd.graph.get_gradient_edge(x)
    with pytest.raises(RuntimeError):
        vector_products(f, [edge], torch.randn(4, 2, 7), 4)


@pytest.mark.parametrize("read_between", [False, True])
def test_inputs_that_wait_are_those_of_their_pass(read_between: bool) -> None:
    """2 rows of 50 inputs wait; the caller may write the next minibatch into the same memory."""
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(50, 3)).double(), nn.CrossEntropyLoss()
    x, y = torch.zeros(2, 50).double(), torch.tensor([0, 2])
    minibatches = torch.randn(3, 2, 50).double()
    with collect(model, "kfac", loss_fn=loss_fn) as q:
        for number, minibatch in enumerate(minibatches):
            x.copy_(minibatch)
            loss_fn(model(x), y).backward()
            if read_between:
                so_far = minibatches[:number + 1].flatten(0, 1)
                close(q["0.weight"].kfac.A_II, so_far.T @ so_far / len(so_far))
    x.zero_()
    all_rows = minibatches.flatten(0, 1)
    close(q["0.weight"].kfac.A_II, all_rows.T @ all_rows / 6)
