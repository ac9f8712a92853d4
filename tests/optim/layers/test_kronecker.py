"""The gradient of an nn.Linear against two preconditioners that stand alone, on [X | 1] and dY
(section A3 of the method).

Letters: N rows (frames), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from tests.reference.kronecker import KroneckerReference

# float64 on both sides; the two differ in the order of sums, and an update squares the condition
# number of the Fisher matrix (at most 1 / delta = 2000): 4e6 roundings of 1e-16
EQUAL: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}
NARROW = (24, 10, 6)        # N, I, O
WIDE = (24, 3, 12)
MANY_ROWS = (1200, 24, 16)    # whose plain gradient is preconditioned
SHAPES = pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [NARROW, WIDE], ids=["narrow", "wide"])


def minibatches(num: int, num_rows: int, num_inputs: int, num_outputs: int, *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and derivatives with one strong direction each, which preconditioning changes."""
    generator = torch.Generator().manual_seed(seed)

    def rows(dim: int, direction: Tensor) -> Tensor:
        strength = torch.randn(num_rows, 1, generator=generator, dtype=torch.float64)
        return 3.0 * strength * direction + torch.randn(num_rows, dim, generator=generator, dtype=torch.float64)

    in_direction, out_direction = (torch.randn(dim, generator=generator, dtype=torch.float64) for dim in (num_inputs, num_outputs))
    for _ in range(num):
        yield rows(num_inputs, in_direction), rows(num_outputs, out_direction)


def layer_of(num_inputs: int, num_outputs: int, *, bias: bool = True,
             max_change_per_sample: float = 0.0) -> tuple[nn.Linear, NGSGD]:
    torch.manual_seed(1)
    layer = nn.Linear(num_inputs, num_outputs, bias=bias, dtype=torch.float64)
    return layer, NGSGD(layer, lr=0.1, max_change_per_sample=max_change_per_sample)


def check(layer: nn.Linear, expected: tuple[Tensor, Tensor | None]) -> None:
    torch.testing.assert_close(layer.weight.grad, expected[0], **EQUAL)
    if expected[1] is not None:
        torch.testing.assert_close(layer.bias.grad, expected[1], **EQUAL)


def backward(layer: nn.Module, X: Tensor, dY: Tensor) -> None:
    """One backward pass in which dY arrives at the layer's output."""
    layer(X).backward(dY)


@pytest.mark.entry("N1", "the model has an `nn.Linear`", "works",
                   "natural gradient of rows of inputs and output gradients; exact classes only, "
                   "since a subclass may compute something else")
@SHAPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_gradient_is_the_product_of_standalone_preconditioned_rows(num_rows: int, num_inputs: int, num_outputs: int,
                                                                   bias: bool) -> None:
    layer, optimizer = layer_of(num_inputs, num_outputs, bias=bias)
    standalone = KroneckerReference(num_inputs, num_outputs, has_bias=bias)
    # updates in calls 0 to 10, 14 and 18
    for X, dY in minibatches(20, num_rows, num_inputs, num_outputs):
        optimizer.zero_grad()
        x = X.clone().requires_grad_()
        backward(layer, x, dY)
        check(layer, standalone.gradient(X, dY))
        # were nothing preconditioned, equality would say little
        assert layer.weight.grad is not None
        assert nn.functional.cosine_similarity(layer.weight.grad.flatten(), (dY.T @ X).flatten(),
                                               dim=0) < 0.99
        assert (layer.bias is None) == (not bias)
        torch.testing.assert_close(x.grad, dY @ layer.weight.detach())  # plain; float64 rounding
    sides = dict(optimizer.preconditioners())
    assert sides["Linear.input"].num_calls == sides["Linear.output"].num_calls == 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_the_plain_gradient_of_many_rows_is_preconditioned(bias: bool, dtype: torch.dtype) -> None:
    layer, optimizer = layer_of(*MANY_ROWS[1:], bias=bias)
    layer.to(dtype)
    expecting, exact = (KroneckerReference(*MANY_ROWS[1:], has_bias=bias, expects_scales=expects) for expects in (True, False))
    # float32: ten steps from the estimates, whose condition number is at most 2000, to the gradient
    equal = EQUAL if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-4 * MANY_ROWS[0]}
    ratios = []
    for X, dY in minibatches(20, *MANY_ROWS):
        side = dict(optimizer.preconditioners())["Linear.input"]
        updates = side.updates_now()
        optimizer.zero_grad()
        backward(layer, X.to(dtype), dY.to(dtype))
        expected, kaldis = expecting.gradient(X, dY), exact.gradient(X, dY)
        assert layer.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad.double(), expected[0], **equal)
        if bias:
            assert layer.bias.grad is not None
            torch.testing.assert_close(layer.bias.grad.double(), expected[1], **equal)
        assert nn.functional.cosine_similarity(layer.weight.grad.flatten().double(), (dY.T @ X).flatten(), dim=0) < 0.99
        if not updates:
            ratios.append(float(layer.weight.grad.norm() / kaldis[0].norm()))
    # rows of one distribution: gamma is that of the minibatch up to the spread of 1,200 rows
    assert len(ratios) == 7 and all(0.9 < ratio < 1.1 for ratio in ratios) and any(abs(ratio - 1.0) > 1e-4 for ratio in ratios)
    assert all(one.num_calls == 20 for _, one in optimizer.preconditioners())


@pytest.mark.parametrize("settings", [{"update": "exact"}, {"on_nonfinite": "raise"}, {"ignore_zero_rows": True},
                                      {"max_change_per_sample": 0.1}], ids=str)
def test_kaldis_scales_of_many_rows_are_one_setting_away(settings: dict[str, Any]) -> None:
    layer = nn.Linear(*MANY_ROWS[1:], dtype=torch.float64)
    optimizer = NGSGD(layer, lr=0.1, **settings)
    exact = KroneckerReference(*MANY_ROWS[1:], has_bias=True)
    for X, dY in minibatches(13, *MANY_ROWS):
        optimizer.zero_grad()
        backward(layer, X, dY)
        check(layer, exact.gradient(X, dY))


@SHAPES
@pytest.mark.parametrize("arranged", [
    pytest.param(lambda rows: rows.view(2, 3, len(rows) // 6, rows.shape[1]), id="leading_dimensions"),
    pytest.param(lambda rows: rows.T.contiguous().T, id="not_contiguous"),
])
def test_rows_may_be_arranged_in_any_way(num_rows: int, num_inputs: int, num_outputs: int,
                                         arranged: Callable[[Tensor], Tensor]) -> None:
    layer, optimizer = layer_of(num_inputs, num_outputs)
    standalone = KroneckerReference(num_inputs, num_outputs, has_bias=True)
    for X, dY in minibatches(4, num_rows, num_inputs, num_outputs):
        optimizer.zero_grad()
        backward(layer, arranged(X), arranged(dY))
        check(layer, standalone.gradient(X, dY))


@pytest.mark.parametrize("shape", [(10,), (5, 10), (3, 4, 10)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_the_output_may_be_changed_in_place(shape: tuple[int, ...], bias: bool) -> None:
    layer, optimizer = layer_of(10, 6, bias=bias)
    plain = nn.Linear(10, 6, bias=bias, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    found = []
    for one in (layer, plain):
        x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
        torch.relu_(one(x)).sum().backward()
        found.append(x.grad)
    assert found[0] is not None and found[0].any() and optimizer is not None
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape", [(0, 10), (4, 0, 10), (0, 4, 10)])
def test_no_rows_have_no_gradient(shape: tuple[int, ...]) -> None:
    layer, optimizer = layer_of(10, 6)
    backward(layer, *next(minibatches(1, 24, 10, 6)))
    optimizer.zero_grad()
    x = torch.empty(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 6) and x.grad is not None and x.grad.shape == shape
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_a_single_vector_is_one_row() -> None:
    layer, optimizer = layer_of(5, 4)
    standalone = KroneckerReference(5, 4, has_bias=True)
    for X, dY in minibatches(4, 1, 5, 4):
        optimizer.zero_grad()
        backward(layer, X[0], dY[0])
        check(layer, standalone.gradient(X, dY))


def test_the_same_derivative_for_all_rows_arrives_expanded() -> None:
    """The derivative of a plain sum is an expanded scalar, whose strides are 0."""
    layer, optimizer = layer_of(10, 6)
    standalone = KroneckerReference(10, 6, has_bias=True)
    for X, _ in minibatches(4, 24, 10, 6):
        optimizer.zero_grad()
        layer(X).sum().backward()
        check(layer, standalone.gradient(X, torch.ones(24, 6, dtype=torch.float64)))


@SHAPES
def test_a_module_used_twice_counts_twice_in_backward_order(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    layer, optimizer = layer_of(num_inputs, num_outputs)
    standalone = KroneckerReference(num_inputs, num_outputs, has_bias=True)
    data = list(minibatches(16, num_rows, num_inputs, num_outputs))
    for (X1, dY1), (X2, dY2) in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        ((layer(X1) * dY1).sum() + (layer(X2) * dY2).sum()).backward()
        # autograd runs the last node first
        second, first = standalone.gradient(X2, dY2), standalone.gradient(X1, dY1)
        assert first[1] is not None and second[1] is not None
        check(layer, (first[0] + second[0], first[1] + second[1]))
    assert dict(optimizer.preconditioners())["Linear.input"].num_calls == 16


@pytest.mark.entry("L16", "you accumulate gradients over several backward passes", "works",
                   "the gradient is the sum of those of the passes, each preconditioned with the "
                   "estimates of its pass")
@SHAPES
def test_accumulated_gradients_are_sums_of_two_calls(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    layer, optimizer = layer_of(num_inputs, num_outputs)
    standalone = KroneckerReference(num_inputs, num_outputs, has_bias=True)
    data = list(minibatches(16, num_rows, num_inputs, num_outputs))
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        backward(layer, *first)
        backward(layer, *second)
        (dW1, db1), (dW2, db2) = standalone.gradient(*first), standalone.gradient(*second)
        assert db1 is not None and db2 is not None
        check(layer, (dW1 + dW2, db1 + db2))


@pytest.mark.entry("N10")
def test_a_bias_alone_gets_its_plain_gradient() -> None:
    """The weight is frozen before or after: a bias alone has no natural gradient."""
    for freeze_first in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(10, 6, dtype=torch.float64)
        layer.weight.requires_grad_(not freeze_first)
        optimizer = NGSGD(layer, lr=0.1, fallback="adamw")
        layer.weight.requires_grad_(False)
        for X, dY in minibatches(3, 24, 10, 6):
            optimizer.zero_grad()
            x = X.clone().requires_grad_()
            backward(layer, x, dY)
            assert layer.weight.grad is None
            # float64 rounding of one sum
            torch.testing.assert_close(layer.bias.grad, dY.sum(dim=0))
            torch.testing.assert_close(x.grad, dY @ layer.weight.detach())


@SHAPES
def test_a_frozen_bias_gets_none_and_the_weight_its_own(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    layer, optimizer = layer_of(num_inputs, num_outputs)
    layer.bias.requires_grad_(False)
    # the 1 stays: the layer has a bias
    standalone = KroneckerReference(num_inputs, num_outputs, has_bias=True)
    for X, dY in minibatches(4, num_rows, num_inputs, num_outputs):
        optimizer.zero_grad()
        backward(layer, X, dY)
        assert layer.bias.grad is None
        torch.testing.assert_close(layer.weight.grad, standalone.gradient(X, dY)[0], **EQUAL)


@pytest.mark.parametrize(("num_inputs", "num_outputs", "bias"),
                         [(6, 1, True), (6, 1, False), (1, 6, False), (1, 6, True), (1, 1, False)])
def test_a_side_of_dimension_one_is_left_unchanged(num_inputs: int, num_outputs: int, bias: bool) -> None:
    layer, optimizer = layer_of(num_inputs, num_outputs, bias=bias)
    standalone = KroneckerReference(num_inputs, num_outputs, has_bias=bias)
    for X, dY in minibatches(20, 16, num_inputs, num_outputs):
        optimizer.zero_grad()
        backward(layer, X, dY)
        check(layer, standalone.gradient(X, dY))
    for side, dim in (("input", num_inputs + bias), ("output", num_outputs)):
        assert (dict(optimizer.preconditioners())[f"Linear.{side}"].state is None) == (dim == 1)


def test_input_that_needs_no_gradient_gets_none_and_changes_nothing() -> None:
    gradients = []
    for needs_gradient in (False, True):
        layer, _ = layer_of(10, 6)
        for X, dY in minibatches(5, 24, 10, 6):
            x = X.clone().requires_grad_(needs_gradient)
            backward(layer, x, dY)
            assert (x.grad is not None) == needs_gradient
        gradients.append(layer.weight.grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_a_minibatch_without_rows_gives_a_zero_gradient_and_leaves_the_estimate_alone() -> None:
    layer, optimizer = layer_of(10, 6)
    for X, dY in minibatches(3, 24, 10, 6):
        backward(layer, X, dY)
    before = {name: p.state_dict() for name, p in optimizer.preconditioners()}
    optimizer.zero_grad()
    backward(layer, torch.zeros(0, 10, dtype=torch.float64), torch.zeros(0, 6, dtype=torch.float64))
    assert layer.weight.grad is not None and not layer.weight.grad.any()
    for name, preconditioner in optimizer.preconditioners():
        assert torch.equal(preconditioner.state_dict()["W"], before[name]["W"])


@SHAPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_the_limit_per_sample_sums_row_products_over_accumulation(num_rows: int, num_inputs: int, num_outputs: int,
                                                                  bias: bool) -> None:
    """C.3: min(1, N m / (lr sum_i |xhat_i| |yhat_i|)), over all passes since the last step."""
    m = 1e-3
    layer, optimizer = layer_of(num_inputs, num_outputs, bias=bias, max_change_per_sample=m)
    for group in optimizer.param_groups:
        group["max_change"] = 0.0
    optimizer.max_param_change = 0.0
    standalone = KroneckerReference(num_inputs, num_outputs, has_bias=bias)
    data = list(minibatches(12, num_rows, num_inputs, num_outputs))
    for pair in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        change, products = torch.zeros_like(layer.weight), 0.0
        for X, dY in pair:
            backward(layer, X, dY)
            Xhat, dYhat = standalone.rows(X, dY)
            products += float((Xhat.norm(dim=1) * dYhat.norm(dim=1)).sum())
            change = change + (dYhat.T @ Xhat)[:, :num_inputs]
        factor = 2 * num_rows * m / (0.1 * products)
        assert factor < 0.9  # the limit is active
        before = layer.weight.detach().clone()
        optimizer.step()
        # the limits are formed in float32: half a rounding of 1.2e-7 each
        torch.testing.assert_close(layer.weight.detach() - before, -0.1 * factor * change, rtol=1e-6, atol=1e-9)


def test_cleared_gradients_clear_the_row_products_too() -> None:
    moved = []
    for discarded in (0, 3):
        layer, optimizer = layer_of(10, 6, max_change_per_sample=1e-3)
        first, last = minibatches(2, 24, 10, 6)
        backward(layer, *first)
        for _, preconditioner in optimizer.preconditioners():
            preconditioner.freeze()
        for _ in range(discarded):
            backward(layer, *first)
        optimizer.zero_grad()
        before = layer.weight.detach().clone()
        backward(layer, *last)
        optimizer.step()
        moved.append(layer.weight.detach() - before)
    torch.testing.assert_close(moved[0], moved[1])  # the same arithmetic; float64


@pytest.mark.parametrize("noise", [0.0, 1e-2])
@pytest.mark.parametrize(("alpha", "num_outputs"), [(4.0, 1000), (0.1, 200)])
def test_float32_keeps_the_norm_of_many_rows_where_derivatives_lie_along_one_direction(alpha: float, num_outputs: int,
                                                                                           noise: float) -> None:
    """|Y - H W|^2 must not come from a subtraction: nearly all of Y is projected out, and with it all digits of float32."""
    num_rows, num_inputs = 2048, 16
    torch.manual_seed(0)
    exact, rounded = nn.Linear(num_inputs, num_outputs, dtype=torch.float64), nn.Linear(num_inputs, num_outputs)
    optimizers = [NGSGD(layer, lr=0.1, alpha=alpha) for layer in (exact, rounded)]
    direction = torch.randn(num_outputs)
    for _ in range(6):
        X, strength = torch.randn(num_rows, num_inputs), torch.randn(num_rows, 1)
        dY = strength * direction + noise * torch.randn(num_rows, num_outputs)
        for layer, optimizer in zip((exact, rounded), optimizers, strict=True):
            optimizer.zero_grad()
            backward(layer, X.to(layer.weight), dY.to(layer.weight))
    assert exact.weight.grad is not None and rounded.weight.grad is not None
    # at least beta / (beta + d) of a row is left, beta = 5e-4 d (1 + alpha) by the floor of rho:
    # for alpha 0.1 that is 5e-4, and float32's 6e-8 becomes 1e-4 of it
    torch.testing.assert_close(rounded.weight.grad.norm().double(), exact.weight.grad.norm(), rtol=1e-3, atol=0.0)
