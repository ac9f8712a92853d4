"""Convolutions under NGSGD: torch's but for the gradients of weight and bias, the reference's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from tests.reference.kronecker import KroneckerReference
from tests.reference.spliced_rows import FilterReference, derivative_rows, spliced_rows

# float64 on both sides, but rows and sums come in another order; an update squares the condition
# number of the Fisher matrix (at most 1 / delta = 2000): 4e6 roundings of 1e-16, relative to the
# largest element
EQUAL: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-9}
# the same operator of torch on the same numbers, or one that sums in another order
PLAIN: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def twins(layer: nn.Module) -> tuple[Any, Any, NGSGD]:
    """(plain, with natural gradient, its optimizer), same parameters."""
    layer = layer.double()
    plain = copy.deepcopy(layer)
    return plain, layer, NGSGD(layer, lr=0.1)


def noise(*shape: int, seed: int) -> Tensor:
    """Correlated along the channels, so that preconditioning changes a lot."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(shape[0], 1, *shape[2:], generator=generator, dtype=torch.float64)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) + 2.0 * shared


def run(layer: Any, x: Tensor, dY_seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(output, its derivative, the derivative of the input) of one forward and backward pass."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    dY = noise(*y.shape, seed=dY_seed) if y.ndim > 2 else noise(1, *y.shape, seed=dY_seed)[0]
    y.backward(dY)
    assert x.grad is not None
    return y.detach(), dY, x.grad


def run_both(plain: Any, layer: Any, x: Tensor, dY_seed: int) -> tuple[Tensor, Tensor]:
    """(output, its derivative) of both layers; their outputs and input derivatives are equal."""
    y_plain, _, dx_plain = run(plain, x, dY_seed)
    y, dY, dx = run(layer, x, dY_seed)
    torch.testing.assert_close(y, y_plain, **PLAIN)
    torch.testing.assert_close(dx, dx_plain, **PLAIN)
    return y, dY


def expect(layer: Any, dW: Tensor, db: Tensor | None) -> None:
    torch.testing.assert_close(layer.weight.grad, dW.reshape(layer.weight.shape), **EQUAL)
    if db is not None:
        torch.testing.assert_close(layer.bias.grad, db, **EQUAL)


def check_spliced(layer: nn.Conv1d, *, num_minibatches: int = 2, batch: int = 2, num_frames: int = 15) -> None:
    plain, layer_ng, _optimizer = twins(layer)
    reference = KroneckerReference(layer.weight[0].numel(), len(layer.weight), has_bias=layer.bias is not None)
    (taps,), (stride,), (dilation,) = layer.kernel_size, layer.stride, layer.dilation
    padding = {"same": dilation * (taps - 1) // 2, "valid": 0}.get(layer.padding, 0) if isinstance(layer.padding, str) \
        else layer.padding[0]
    for t in range(num_minibatches):
        x = noise(batch, layer.in_channels, num_frames, seed=2 * t)
        y, dY = run_both(plain, layer_ng, x, 2 * t + 1)
        X = spliced_rows(x, y.shape[2], taps=taps, stride=stride, left_padding=padding, dilation=dilation,
                         padding_mode=layer.padding_mode)
        expect(layer_ng, *reference.gradient(X, derivative_rows(dY)))


@pytest.mark.entry("N4", "the model has an `nn.Conv1d` with one group", "works",
                   "natural gradient, as of a Linear layer on spliced frames, for all strides, "
                   "dilations, paddings and padding modes")
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 2), (1, "same"), (2, 0), (2, 2), (2, "valid")])
@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (1, 3), (5, 1), (3, 3)])
def test_conv1d_is_an_affine_layer_on_spliced_frames(taps: int, dilation: int, stride: int, padding: int | str,
                                                     padding_mode: Any) -> None:
    torch.manual_seed(0)
    check_spliced(nn.Conv1d(3, 4, taps, stride=stride, padding=padding, dilation=dilation, padding_mode=padding_mode))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("num_in", "num_out"), [(4, 3), (2, 20)], ids=["rows", "factored"])
def test_conv1d_over_many_minibatches(num_in: int, num_out: int, bias: bool) -> None:
    """So many that some of them do not update the estimates."""
    torch.manual_seed(0)
    check_spliced(nn.Conv1d(num_in, num_out, 3, bias=bias), num_minibatches=18)


# torch's plain layer copies its input then
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("taps", [2, 4])
def test_conv1d_with_padding_same_that_is_longer_on_the_right(taps: int) -> None:
    torch.manual_seed(0)
    check_spliced(nn.Conv1d(3, 4, taps, padding="same"))


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "circular"])
def test_an_unbatched_input_is_one_sequence(padding_mode: Any) -> None:
    torch.manual_seed(0)
    plain, layer, _optimizer = twins(nn.Conv1d(3, 4, 3, padding=1, padding_mode=padding_mode))
    reference = KroneckerReference(9, 4, has_bias=True)
    for t in range(3):
        x = noise(1, 3, 15, seed=t)[0]
        y, dY = run_both(plain, layer, x, t)
        assert y.shape == (4, 15)
        X = spliced_rows(x[None], 15, taps=3, stride=1, left_padding=1, dilation=1, padding_mode=padding_mode)
        expect(layer, *reference.gradient(X, derivative_rows(dY[None])))


def test_an_unbatched_image() -> None:
    torch.manual_seed(0)
    plain, layer, _optimizer = twins(nn.Conv2d(3, 4, 3))
    run_both(plain, layer, noise(1, 3, 6, 5, seed=0)[0], 1)


FILTERED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: nn.Conv2d(3, 5, 3, padding=1), (4, 3, 7, 6)),
    "conv2d_without_bias": (lambda: nn.Conv2d(3, 5, (3, 1), bias=False), (4, 3, 7, 6)),
    "conv2d_strided_dilated": (lambda: nn.Conv2d(2, 6, (3, 2), stride=(1, 2), dilation=(2, 1), padding=(1, 0)), (4, 2, 9, 6)),
    "conv2d_same": (lambda: nn.Conv2d(2, 6, (3, 2), padding="same"), (4, 2, 7, 6)),
    "conv2d_circular": (lambda: nn.Conv2d(2, 6, 3, padding=(1, 2), padding_mode="circular"), (4, 2, 7, 6)),
    "conv2d_one_filter": (lambda: nn.Conv2d(3, 1, 3), (4, 3, 7, 6)),
    "conv2d_grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 4, 7, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 5, (2, 3, 1)), (3, 2, 4, 5, 3)),
    "conv1d_grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1), (4, 4, 15)),
    "conv1d_depthwise": (lambda: nn.Conv1d(5, 5, 3, groups=5, padding="same"), (4, 5, 15)),
    "conv1d_depthwise_one_tap_no_bias": (lambda: nn.Conv1d(5, 5, 1, groups=5, bias=False), (4, 5, 15)),
    "conv1d_depthwise_reflect": (lambda: nn.Conv1d(5, 10, 3, groups=5, padding=2, padding_mode="reflect"), (4, 5, 15)),
}


@pytest.mark.entry("N5", "the model has an `nn.Conv2d`, `nn.Conv3d` or a grouped convolution",
                   "works", "natural gradient of the rows of the gradient, then of its transpose")
@pytest.mark.parametrize("case", FILTERED)
def test_other_convolutions_precondition_rows_of_the_gradient_then_of_its_transpose(case: str) -> None:
    torch.manual_seed(0)
    make, shape = FILTERED[case]
    plain, layer, _optimizer = twins(make())
    weight, bias = plain.weight, plain.bias
    assert isinstance(weight, Tensor)
    reference = FilterReference(weight[0].numel(), len(weight), has_bias=bias is not None)
    for t in range(14):
        run_both(plain, layer, noise(*shape, seed=2 * t), 2 * t + 1)
        assert weight.grad is not None
        expect(layer, *reference.gradient(weight.grad, bias.grad if isinstance(bias, Tensor) else None))


def test_gradients_differ_from_the_plain_ones() -> None:
    """Guards the tests of this file: were nothing preconditioned, equality would say little."""
    torch.manual_seed(0)
    for convolution, shape in ((nn.Conv1d(3, 4, 3), (4, 3, 15)), (nn.Conv2d(3, 5, 3, padding=1), (4, 3, 7, 6))):
        plain, layer, _optimizer = twins(convolution)
        for t in range(3):
            x = noise(*shape, seed=2 * t)
            run(plain, x, 2 * t + 1)
            run(layer, x, 2 * t + 1)
        ours, theirs = layer.weight.grad, plain.weight.grad
        assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
        assert float((ours - theirs).norm()) > 0.1 * float(theirs.norm())


@pytest.mark.parametrize(("make", "shape"), [(lambda: nn.Conv1d(3, 4, 3), (2, 3, 9)), (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 5)),
                                             (lambda: nn.Conv1d(4, 4, 3, groups=4), (2, 4, 9))],
                         ids=["conv1d", "conv2d", "depthwise"])
def test_frozen_weight_frozen_bias_and_input_without_gradient(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain, layer, _optimizer = twins(make())
    x, y_seed = noise(*shape, seed=0), 1
    run(plain, x, y_seed)
    layer.weight.requires_grad_(False)
    _, dY, _ = run(layer, x, y_seed)
    assert layer.weight.grad is None
    # alone it gets its plain gradient
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad, **PLAIN)

    both = copy.deepcopy(plain)
    _optimizer = NGSGD(both, lr=0.1)
    run(both, x, y_seed)
    frozen = copy.deepcopy(plain)
    _frozen_optimizer = NGSGD(frozen, lr=0.1)
    frozen.bias.requires_grad_(False)
    frozen.zero_grad()
    frozen(x).backward(dY)  # x needs no gradient here
    assert frozen.bias.grad is None
    torch.testing.assert_close(frozen.weight.grad, both.weight.grad, **EQUAL)


def test_a_convolution_used_twice_counts_twice() -> None:
    torch.manual_seed(0)
    _, layer, optimizer = twins(nn.Conv1d(3, 4, 3))
    reference = KroneckerReference(9, 4, has_bias=True)
    first, second, dY = noise(2, 3, 9, seed=0), noise(2, 3, 9, seed=1), noise(2, 4, 7, seed=2)
    ((layer(first) * dY).sum() + (layer(second) * dY).sum()).backward()
    splicing: dict[str, Any] = {"taps": 3, "stride": 1, "left_padding": 0, "dilation": 1, "padding_mode": "zeros"}
    # autograd runs the last node first
    (dW2, db2), (dW1, db1) = (reference.gradient(spliced_rows(x, 7, **splicing), derivative_rows(dY)) for x in (second, first))
    assert db1 is not None and db2 is not None
    expect(layer, dW1 + dW2, db1 + db2)
    assert {p.num_calls for _, p in optimizer.preconditioners()} == {2}


def test_without_gradients_the_forward_pass_is_torchs_own() -> None:
    torch.manual_seed(0)
    plain, layer, optimizer = twins(nn.Conv1d(3, 4, 3, padding=2, padding_mode="circular"))
    x = noise(2, 3, 9, seed=0)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))
    assert {p.num_calls for _, p in optimizer.preconditioners()} == {0}


def test_channels_last_images_give_the_same_gradient() -> None:
    torch.manual_seed(0)
    plain, rows_first, _optimizer = twins(nn.Conv2d(3, 5, 3))
    _, channels_last, _other = twins(plain.to(memory_format=torch.channels_last))
    for t in range(3):
        x = noise(2, 3, 6, 5, seed=t)
        _, _, dx = run(rows_first, x, t)
        _, _, dx_last = run(channels_last, x.to(memory_format=torch.channels_last), t)
        torch.testing.assert_close(dx_last, dx, **PLAIN)
        # the plain gradients differ by rounding; of the 14 directions that are kept of 5 rows, some
        # exist only in rounding
        difference = channels_last.weight.grad - rows_first.weight.grad
        assert float(difference.norm()) < 1e-3 * float(rows_first.weight.grad.norm())


def test_an_input_that_does_not_fit_is_refused_in_torchs_words() -> None:
    layer = nn.Conv1d(3, 4, 3)
    _optimizer = NGSGD(layer, lr=0.1)
    with pytest.raises(RuntimeError, match="channels"):
        layer(torch.randn(2, 5, 9))
