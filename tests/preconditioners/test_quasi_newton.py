"""K-BFGS against dense BFGS updates, its second look at a minibatch, and quadratics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngsgd.optim
from ngsgd.errors import ConfigError, NgsgdWarning
from ngsgd.preconditioners import KBFGS, Preconditioner
from tests.preconditioners.problems import NAMES, Problem, close, gradients_of, joint, move, problem
from tests.reference import quasi_newton as dense

LR = 0.05


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _spd(size: int) -> Tensor:
    root = _drawn(size, size + 2)
    return root @ root.T


def _steps(preconditioner: Preconditioner, case: Problem, steps: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(parameters, plain gradients) before each step of SGD with preconditioned gradients."""
    found = []
    for _ in range(steps):
        case.model.zero_grad()
        preconditioner.evaluate(lambda: case.loss(case.model(case.x)))
        found.append(({name: p.detach().clone() for name, p in case.model.named_parameters()},
                      gradients_of(case.model)))
        preconditioner.step()
        move(case.model, LR)
    return found


def _set(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


@pytest.mark.parametrize("name", NAMES)
def test_kbfgs_equals_dense_updates_of_both_factors(name: str) -> None:
    case, damping, decay = problem(name), 0.04, 0.7
    preconditioner = KBFGS(case.model, damping=damping, ema_decay=decay)
    seen = _steps(preconditioner, case, 3)
    preconditioner.run_second_pass()
    looks = [theta for theta, _ in seen] + [{key: p.detach().clone() for key, p in case.model.named_parameters()}]
    root = damping**0.5
    factors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for before, after in pairwise(looks):
        for layer, (a, z, e, z_after, e_after) in _means(case, before, after).items():
            A = a.T @ a / len(a)
            if layer not in factors:
                H_a, H_g = torch.linalg.inv(A + root * torch.eye(len(A), dtype=A.dtype)), torch.eye(len(z), dtype=A.dtype)
            else:
                A_old, H_a, H_g = factors[layer]
                A = decay * A_old + (1.0 - decay) * A
                s = H_a @ a.mean(dim=0)
                H_a = dense.bfgs(H_a, s, A @ s + root * s)
            H_g = dense.bfgs(H_g, *dense.double_damping(H_g, z_after - z, e_after - e, 0.2, root))
            factors[layer] = A, H_a, H_g
    g = case.gradients()
    found = preconditioner.apply(g)
    for layer, (_, H_a, H_g) in factors.items():
        close(joint(found, layer), H_g @ joint(g, layer) @ H_a)


def _means(case: Problem, before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """(input rows, mean z, mean e, and the two after the step) of each layer."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for values in (before, after):
        _set(case.model, values)
        for layer, a_NTI, e_VNTO in case.layers():
            a = a_NTI.flatten(0, 1)
            z = joint(values, layer) @ a.mean(dim=0)
            e = e_VNTO.sum(dim=(0, 1, 2)) / case.num_rows
            found[layer] = (*found[layer], z, e) if layer in found else (a, z, e)
    return found


def test_kbfgs_factors_come_to_the_inverse_on_a_quadratic() -> None:
    """z = W a + b, squared error of M z: the Hessian in z is 2/4 M^T M."""
    torch.manual_seed(2)
    M = nn.Linear(4, 4, bias=False).double().requires_grad_(False)
    model = nn.Sequential(nn.Linear(3, 4).double(), M)
    M.weight.copy_(torch.linalg.cholesky(_spd(4)))
    damping = 1e-4
    preconditioner = KBFGS(model, damping=damping)
    x = _drawn(20, 3)

    def loss() -> Tensor:
        return nn.functional.mse_loss(model(x), torch.zeros(20, 4, dtype=torch.float64), reduction="sum") / 20.0
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    for _ in range(120):
        model.zero_grad()
        preconditioner.evaluate(loss)
        preconditioner.step()
        with torch.no_grad():
            layer.bias.add_(torch.randn(4, dtype=torch.float64))
    preconditioner.run_second_pass()
    H_g, H_a = (preconditioner.inverses["0.weight"][key] for key in ("H_g", "H_a"))
    # curvature is that of torch's mean, over rows and the 4 numbers of each
    wanted = torch.linalg.inv(2.0 / 4.0 * M.weight.T @ M.weight + damping**0.5 * torch.eye(4, dtype=torch.float64))
    assert float((H_g - wanted).norm() / wanted.norm()) < 0.01
    a = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], dim=1)
    A = a.T @ a / 20.0 + damping**0.5 * torch.eye(4, dtype=torch.float64)
    close(H_a, torch.linalg.inv(A))   # the same minibatch always: the start is the end


class _Noisy(nn.Module):
    """Draws random numbers and keeps running statistics in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(5, 3), nn.Dropout(0.5)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.linear(self.drop(x))
        return found


def test_the_second_pass_repeats_the_first_and_changes_nothing() -> None:
    torch.manual_seed(3)
    model = _Noisy()
    case = problem("linear")
    x, outputs = case.x.float(), []

    def loss() -> Tensor:
        outputs.append(model.drop(torch.ones(50)))
        return nn.functional.cross_entropy(model(x), case.y)
    preconditioner = KBFGS(model, damping=0.1)
    preconditioner.evaluate(loss)
    preconditioner.step()
    assert model.linear.weight.grad is not None
    grad = model.linear.weight.grad.clone()
    preconditioner.run_second_pass()
    assert len(outputs) == 1   # the parameters have not moved
    move(model, 0.1)
    state = torch.get_rng_state()
    preconditioner.run_second_pass()
    assert len(outputs) == 2 and torch.equal(*outputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(model.get_buffer("calls")) == 1.0
    assert torch.equal(model.linear.weight.grad, grad)


@pytest.mark.parametrize("optimizer", [lambda model: ngsgd.optim.SGD(model, lr=LR),
                                       lambda model: torch.optim.SGD(model.parameters(), lr=LR),
                                       lambda model: torch.optim.SGD(model.parameters(), lr=LR, fused=True)],
                         ids=["ngsgd", "torch", "fused"])
def test_the_step_of_every_optimizer_is_detected(optimizer: Callable[..., Any]) -> None:
    """Fused kernels do not raise a parameter's version counter."""
    case = problem("linear")
    steps, calls = optimizer(case.model), []

    def loss() -> Tensor:
        calls.append(1)
        return case.loss(case.model(case.x))
    preconditioner = KBFGS(case.model, damping=0.1)
    preconditioner.evaluate(loss)
    preconditioner.step()
    steps.step()
    preconditioner.run_second_pass()
    assert len(calls) == 2


def test_a_loop_without_a_closure_raises_an_error() -> None:
    case = problem("linear")
    preconditioner = KBFGS(case.model)
    with preconditioner.watch():
        preconditioner.backward(case.loss(case.model(case.x)))
    with pytest.raises(ConfigError, match=r"evaluate\(closure\)"):
        preconditioner.step()


def test_rows_of_the_reference_are_those_of_the_problem() -> None:
    """The oracle's mean derivative is the bias's gradient: else a wrong sign would not show."""
    case = problem("linear")
    g = case.gradients()
    for layer, _, e_VNTO in case.layers():
        close(e_VNTO.sum(dim=(0, 1, 2)) / case.num_rows, g[f"{layer}.bias"])


def test_a_scaler_that_changes_its_scale_changes_no_direction() -> None:
    """Unscaled between look and step, as by torch.amp.GradScaler; the scale halves."""
    found = []
    for scales in ((1.0, 1.0, 1.0), (64.0, 32.0, 16.0)):
        case = problem("linear")
        preconditioner, scale = KBFGS(case.model, damping=0.1), [1.0]
        for scale[0] in scales:
            case.model.zero_grad()
            preconditioner.evaluate(partial(_scaled_loss, case, scale))
            for p in case.model.parameters():
                assert p.grad is not None
                p.grad /= scale[0]
            preconditioner.step()
            move(case.model, LR)
        found.append(dense.flat({name: p.detach() for name, p in case.model.named_parameters()}))
    close(found[0], found[1])


def _scaled_loss(case: Problem, scale: list[float]) -> Tensor:
    return case.loss(case.model(case.x)) * scale[0]


@pytest.mark.entry("B10", "a loss is NaN while you use KBFGS", "works",
                   "the minibatch is skipped and counted in num_skipped, and later steps use the curvature before it")
@pytest.mark.parametrize("interval", [1, 2])
def test_kbfgs_skips_a_minibatch_whose_loss_is_nan(interval: int) -> None:
    case = problem("linear")
    preconditioner = KBFGS(case.model, damping=0.1, curvature_interval=interval, inverse_interval=interval)
    x, found = case.x.clone(), []
    for step in range(6):
        case.x[:] = float("nan") if step == 2 else x
        case.model.zero_grad()
        with pytest.warns(NgsgdWarning) if step == 2 else contextlib.nullcontext():
            preconditioner.evaluate(lambda: case.loss(case.model(case.x)))
            preconditioner.step()
        with torch.no_grad():
            for p in case.model.parameters():
                assert p.grad is not None
                if step != 2:
                    p.sub_(p.grad, alpha=0.01)
                    found.append(bool(p.isfinite().all()))
                else:
                    # a loop that continues: the parameters move, the minibatch is evaluated again
                    p.mul_(1.001)
    assert all(found) and preconditioner.num_skipped > 0
