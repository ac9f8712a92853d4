"""Kaldi's rules around a step against section A5: backstitch, l2, orthonormality."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.errors import ConfigError
from ngsgd.optim import SGD, Optimizer
from ngsgd.optim.backstitch import backstitch_step
from tests.optim.moved import gradients_of, parameters_of

KINDS = pytest.mark.parametrize("kind", [SGD, NGSGD])
NO_LIMITS: dict[str, Any] = {"max_change": 0.0, "max_param_change": 0.0}
# float64 parameters, but the limits and the sum of a step are formed in other orders
EQUAL: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(next(model.parameters()))
    return nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), reduction="sum")


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        return loss
    return closure


# --- backstitch ---

@KINDS
def test_backstitch_is_a_step_back_and_a_longer_one_forward_on_fresh_gradients(kind: type[SGD]) -> None:
    """theta1 = theta0 + s lr g(theta0), theta2 = theta1 - (1 + s) lr g(theta1), one estimate."""
    s, lr = 0.3, 0.002
    model = network()
    optimizer = kind(model, lr, **NO_LIMITS)
    for seed in range(16):
        explicit = copy.deepcopy(model)
        other = kind(explicit, lr, **NO_LIMITS)
        # with the estimates as they are before the minibatch
        other.load_state_dict(optimizer.state_dict())
        if isinstance(other, NGSGD):
            other.freeze(True)
        optimizer_start = parameters_of(model)
        loss = backstitch_step(optimizer, closure_of(model, optimizer, seed), s)

        explicit.zero_grad()
        first = loss_of(explicit, seed)
        first.backward()
        with torch.no_grad():
            for p in explicit.parameters():
                assert p.grad is not None
                p.add_(p.grad, alpha=s * lr)
        explicit.zero_grad()
        loss_of(explicit, seed).backward()
        with torch.no_grad():
            for p in explicit.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=(1.0 + s) * lr)
        torch.testing.assert_close(loss, first)  # before the step back
        moved = parameters_of(model) - optimizer_start
        # rates in float32
        torch.testing.assert_close(moved, parameters_of(explicit) - optimizer_start, rtol=1e-5, atol=1e-10)


def test_backstitch_moves_the_fisher_estimates_once_on_the_fresh_gradients() -> None:
    model = network()
    optimizer = NGSGD(model, 0.002)
    for seed in range(13):
        before = {name: p.state_dict() for name, p in optimizer.preconditioners()}
        calls = 0

        def closure(seed: int = seed, before: dict[str, dict[str, Any]] = before) -> Tensor:
            nonlocal calls
            loss = closure_of(model, optimizer, seed)()
            calls += 1
            for name, preconditioner in optimizer.preconditioners():
                state = preconditioner.state_dict()
                assert state["t"] == seed + (calls == 2)
                if calls == 1 and seed > 0:
                    assert torch.equal(state["W"], before[name]["W"]), name
            return loss
        backstitch_step(optimizer, closure, 0.3)
        assert calls == 2
        if 0 < seed <= 10:  # these calls update
            assert all(not torch.equal(p.state_dict()["W"], before[name]["W"]) for name, p in optimizer.preconditioners())
    assert not any(preconditioner.frozen for _, preconditioner in optimizer.preconditioners())


def test_backstitch_thaws_the_estimates_if_the_closure_fails() -> None:
    optimizer = NGSGD(network(), 0.002)

    def closure() -> Tensor:
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        backstitch_step(optimizer, closure, 0.3)
    assert not any(preconditioner.frozen for _, preconditioner in optimizer.preconditioners())


@KINDS
def test_the_limits_go_with_the_steps_of_backstitch(kind: type[SGD]) -> None:
    s, limit = 0.5, 0.01
    model = network()
    optimizer = kind(model, 10.0, max_change=0.0, max_param_change=limit)
    places = [parameters_of(model)]

    def closure() -> Tensor:
        places.append(parameters_of(model))
        return closure_of(model, optimizer, 0)()
    backstitch_step(optimizer, closure, s)
    start, back, end = places[1], places[2], parameters_of(model)
    # the limits are formed in float32
    assert float((back - start).norm()) == pytest.approx(s * limit, rel=1e-5)
    assert float((end - back).norm()) == pytest.approx((1.0 + s) * limit, rel=1e-5)


@KINDS
def test_backstitch_decays_weights_exactly_once(kind: type[SGD]) -> None:
    """theta2 = theta1 - (1 + s) lr g(theta1) - 2 n l2 lr theta1; none in the step back."""
    s, lr, decay, n = 0.3, 0.002, 0.01, 16
    model = network()
    optimizer = kind(model, lr, weight_decay=decay, **NO_LIMITS)
    start = parameters_of(model)
    seen = []

    def closure() -> Tensor:
        loss = closure_of(model, optimizer, 0)()
        seen.append((parameters_of(model), gradients_of(model)))
        return loss
    backstitch_step(optimizer, closure, s, num_samples=n)
    (theta0, g0), (theta1, g1) = seen
    assert torch.equal(theta0, start)
    torch.testing.assert_close(theta1, theta0 + s * lr * g0, **EQUAL)
    expected = theta1 - (1.0 + s) * lr * g1 - 2.0 * n * decay * lr * theta1
    torch.testing.assert_close(parameters_of(model), expected, **EQUAL)


@KINDS
def test_backstitch_with_momentum_is_refused(kind: type[SGD]) -> None:
    model = network()
    optimizer = kind(model, 0.1, momentum=0.9)
    before = parameters_of(model)
    with pytest.raises(ConfigError, match=r"momentum 0, not 0\.9"):
        backstitch_step(optimizer, closure_of(model, optimizer, 0), 0.3)
    assert torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("scale", [0.0, -0.3, float("nan")])
def test_a_backstitch_scale_that_is_not_positive_is_refused(scale: float) -> None:
    model = network()
    optimizer = NGSGD(model, 0.1)
    with pytest.raises(ConfigError, match="greater than 0"):
        backstitch_step(optimizer, closure_of(model, optimizer, 0), scale)


# --- l2 ---

@KINDS
@pytest.mark.parametrize("lr_factor", [1.0, 0.25])
def test_weight_decay_is_kaldis_formula(kind: type[SGD], lr_factor: float) -> None:
    """theta - lr c g - 2 n l2 lr c theta, c the layer's factor."""
    lr, decay, n = 0.002, 0.01, 16
    model = network()
    optimizer = kind(model, lr, weight_decay=decay, layer_options={"*": {"lr_factor": lr_factor}}, **NO_LIMITS)
    for seed in range(3):
        closure_of(model, optimizer, seed)()
        start, gradient = parameters_of(model), gradients_of(model)
        optimizer.step(num_samples=n)
        expected = start - lr * lr_factor * (gradient + 2.0 * n * decay * start)
        torch.testing.assert_close(parameters_of(model), expected, **EQUAL)


@KINDS
def test_weight_decay_with_momentum_enters_the_velocity(kind: type[SGD]) -> None:
    """v = m v - lr (g + 2 n l2 theta); theta + (1 - m) v."""
    lr, decay, n, m = 0.002, 0.01, 16, 0.9
    model = network()
    optimizer = kind(model, lr, weight_decay=decay, momentum=m, **NO_LIMITS)
    velocity = torch.zeros_like(parameters_of(model))
    for seed in range(4):
        closure_of(model, optimizer, seed)()
        start = parameters_of(model)
        velocity = m * velocity - lr * (gradients_of(model) + 2.0 * n * decay * start)
        optimizer.step(num_samples=n)
        torch.testing.assert_close(parameters_of(model), start + (1.0 - m) * velocity, **EQUAL)


# --- semi-orthogonal layers ---

def off_orthogonality(weight: Tensor) -> float:
    """|P / s - I| for P = M M^T of the shorter side and s its mean eigenvalue: 0 for orthogonal rows of one size."""
    M = weight.detach().flatten(1)
    M = M if M.shape[0] <= M.shape[1] else M.T
    P = M @ M.T
    return float((P / (P.trace() / len(P)) - torch.eye(len(P)).to(P)).norm())


def factored_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 5, bias=False), nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3))


def train_factored(model: nn.Module, optimizer: Optimizer, num_steps: int) -> list[bool]:
    """Returns whether the bottleneck's rows came nearer to orthogonal, step by step."""
    nearer = []
    for seed in range(num_steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), reduction="sum").backward()
        before = off_orthogonality(model.get_parameter("2.weight"))
        optimizer.step()
        nearer.append(off_orthogonality(model.get_parameter("2.weight")) < before)
    return nearer


@KINDS
def test_rows_of_a_semi_orthogonal_layer_become_orthogonal_and_others_do_not(kind: type[SGD]) -> None:
    model = factored_network()
    before = {name: off_orthogonality(model.get_parameter(name)) for name in ("0.weight", "2.weight", "3.weight")}
    optimizer = kind(model, 1e-4, layer_options={"2": {"orthonormal_constraint": -1.0}})
    train_factored(model, optimizer, 40)
    after = {name: off_orthogonality(model.get_parameter(name)) for name in before}
    # ten pulls: the first ones at a quarter of the speed, since singular values differ; then the
    # error squares with each
    assert after["2.weight"] < 0.01 * before["2.weight"]
    assert after["0.weight"] > 0.8 * before["0.weight"] and after["3.weight"] > 0.8 * before["3.weight"]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_fixed_scale_is_the_singular_value_of_the_rows(scale: float) -> None:
    model = factored_network()
    optimizer = SGD(model, 0.0, layer_options={"2": {"orthonormal_constraint": scale}})
    train_factored(model, optimizer, 160)
    singular = torch.linalg.svdvals(model.get_parameter("2.weight").detach())
    # 40 pulls
    torch.testing.assert_close(singular, torch.full_like(singular, scale), rtol=1e-3, atol=0.0)


@KINDS
def test_a_semi_orthogonal_layer_is_pulled_every_fourth_step_only(kind: type[SGD]) -> None:
    model = factored_network()
    optimizer = kind(model, 0.0, layer_options={"2": {"orthonormal_constraint": -1.0}})
    pulled = train_factored(model, optimizer, 12)  # with lr 0 nothing else moves
    assert sum(pulled) == 3
    first = pulled.index(True)
    assert [step for step, is_pulled in enumerate(pulled) if is_pulled] == [first, first + 4, first + 8]


def test_several_semi_orthogonal_layers_take_turns() -> None:
    model = factored_network()
    optimizer = SGD(model, 0.0, layer_options={"*": {"orthonormal_constraint": -1.0}})
    moved = []
    for seed in range(8):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).sum().backward()
        optimizer.step()
        moved.append([name for name, value in model.state_dict().items() if not torch.equal(value, before[name])])
    # biases have no rows
    assert all(len(names) == 1 and names[0].endswith("weight") for names in moved)
    assert sorted({names[0] for names in moved}) == ["0.weight", "2.weight", "3.weight", "5.weight"]


def test_training_with_a_semi_orthogonal_layer_resumes_bitwise_identically() -> None:
    """Also where it was stopped between two pulls."""
    options = {"2": {"orthonormal_constraint": -1.0}}
    model = factored_network()
    optimizer = NGSGD(model, 0.01, layer_options=options)
    train_factored(model, optimizer, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train_factored(model, optimizer, 7)
    resumed = factored_network()
    other = NGSGD(resumed, 0.01, layer_options=options)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train_factored(resumed, other, 7)
    assert torch.equal(parameters_of(model), parameters_of(resumed))


def test_backstitch_pulls_a_semi_orthogonal_layer_every_fourth_minibatch() -> None:
    """Kaldi draws once for the two steps of a minibatch."""
    model = factored_network()
    optimizer = SGD(model, 0.0, layer_options={"2": {"orthonormal_constraint": -1.0}})
    pulled = 0
    for seed in range(8):
        before = model.get_parameter("2.weight").detach().clone()
        backstitch_step(optimizer, closure_of(model, optimizer, seed), 0.3)
        pulled += not torch.equal(model.get_parameter("2.weight"), before)
    assert pulled == 2
