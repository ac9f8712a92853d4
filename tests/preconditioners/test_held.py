"""evaluate_and_step, which preconditions rows before their product, against evaluate and step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ngsgd.preconditioners import EKFAC, KBFGS, KFAC, PSGD, SENG, SKFAC, SMWNG, DiagonalNG, Preconditioner, Shampoo
from tests.preconditioners.problems import close

F = nn.functional
N = 5


def _net() -> nn.Sequential:
    """Layers wider than the minibatch on both sides, on one of the sides, and on neither."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4, bias=False), nn.Tanh(), nn.Linear(4, 8), nn.Tanh(),
                         nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 4)).double()


def _minibatch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(N, 7, generator=generator, dtype=torch.float64), torch.randint(4, (N,), generator=generator)


def _trained(method: type[Preconditioner], *, at_once: bool, loss: Any = None, steps: int = 5, **options: Any) -> list[Tensor]:
    model = _net()
    preconditioner = method(model, damping=0.1, **{"curvature_interval": 2, "inverse_interval": 2, **options})
    for step in range(steps):
        x, y = _minibatch(step)
        model.zero_grad()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(model(x), y) if loss is None else loss(model, x, y)
        if at_once:
            preconditioner.evaluate_and_step(closure, lr=0.01)
        else:
            preconditioner.evaluate(closure)
            preconditioner.step(lr=0.01)
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None and p.grad.shape == p.shape
                p.sub_(p.grad, alpha=0.01)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("graft", ["none", "gradient"])
@pytest.mark.parametrize(("method", "options"), [
    (KFAC, {}), (KFAC, {"fisher": "exact"}), (SKFAC, {}), (KBFGS, {}), (PSGD, {}), (Shampoo, {"block_size": 4}), (Shampoo, {}),
    (EKFAC, {}), (DiagonalNG, {}), (SENG, {}), (SENG, {"sketch": 4}), (SENG, {"fisher": "exact"}), (SMWNG, {}),
    (SMWNG, {"fisher": "mc", "num_draws": 2}), (SENG, {"inverse_interval": 3}), (SMWNG, {"inverse_interval": 3}),
    (KFAC, {"skip": ("2",)}), (KFAC, {"kl_clip": 0.0})])
def test_rows_before_the_product_give_the_same_parameters(method: type[Preconditioner], options: dict[str, Any],
                                                          graft: str) -> None:
    wanted = _trained(method, at_once=False, graft=graft, **options)
    found = _trained(method, at_once=True, graft=graft, **options)
    for one, other in zip(wanted, found, strict=True):
        close(other, one)


def test_weights_of_wide_layers_have_no_gradient_before_the_step() -> None:
    model = _net()
    preconditioner = KFAC(model)
    seen: list[str] = []

    def backward(loss: Tensor) -> None:
        loss.backward()
        seen.extend(name for name, p in model.named_parameters() if p.grad is not None)
    preconditioner.backward = backward  # type: ignore[method-assign]
    x, y = _minibatch(0)
    preconditioner.evaluate_and_step(lambda: F.cross_entropy(model(x), y))
    assert seen == ["8.weight", "8.bias"]   # 3 inputs and 4 outputs, 5 rows: nothing to be saved


def _penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A weight that is used in a penalty, too."""
    first = next(model.parameters())
    return F.cross_entropy(model(x), y) + 0.1 * first.square().sum()


def _twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Every layer is called twice; the passes count as one minibatch of twice the rows."""
    return F.cross_entropy(model(torch.cat([x, x.flip(0)])), torch.cat([y, y]))


def _adversarial(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A gradient w.r.t. the input alone is taken between; its rows are no gradient of layers."""
    moved = x.clone().requires_grad_()
    hidden = model[0](moved)   # type: ignore[index]
    (direction,) = torch.autograd.grad(hidden.square().sum(), moved)
    return F.cross_entropy(model(x + 0.01 * direction), y)


def _gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss with a derivative in it, which is differentiated again."""
    weight = next(model.parameters())
    (g,) = torch.autograd.grad(F.linear(x, weight).pow(3).sum(), weight, create_graph=True)
    return F.cross_entropy(model(x), y) + 1e-4 * g.square().sum()


@pytest.mark.parametrize("loss", [_penalised, _twice, _adversarial, _gradient_penalty])
def test_other_uses_of_weights_and_of_derivatives_count_as_ever(loss: Any) -> None:
    # the first curvature updates skip layers whose derivative is not taken in the pass, so the
    # curvature comes from step 0 alone
    wanted, found = (_trained(Shampoo, at_once=at_once, loss=loss) for at_once in (False, True))
    for one, other in zip(wanted, found, strict=True):
        close(other, one)


def test_rows_are_float32_under_autocast() -> None:
    found = []
    for enabled in (False, True):
        model = _net().float()
        preconditioner = KFAC(model, damping=0.1)
        x, y = _minibatch(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            preconditioner.evaluate_and_step(lambda: F.cross_entropy(model(x.float()), y))  # noqa: B023
        found.append([p.grad for p in model.parameters()])
    for plain, cast in zip(*found, strict=True):
        assert plain is not None and cast is not None and cast.dtype == torch.float32
        # 8 bits of bfloat16
        torch.testing.assert_close(cast, plain, rtol=0.1, atol=0.02 * float(plain.abs().max()))


@pytest.mark.parametrize("method", [KFAC, SMWNG, SENG, DiagonalNG])
def test_a_grad_scaler_changes_no_step(method: type[Preconditioner]) -> None:
    found = []
    for scale in (1.0, 1024.0):   # powers of two: no rounding
        model = _net()
        preconditioner, optimizer = method(model, damping=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            x, y = _minibatch(step)
            optimizer.zero_grad()
            preconditioner.evaluate_and_step(lambda x=x, y=y: scaler.scale(F.cross_entropy(model(x), y)))  # type: ignore[misc] # noqa: B023
            scaler.step(optimizer)   # divides directions by the scale
            scaler.update()
        found.append([p.detach() for p in model.parameters()])
    for plain, scaled in zip(*found, strict=True):
        close(scaled, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_in_the_backward_pass_have_the_same_gradient(reentrant: bool) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        layers = list(model.children())
        hidden = layers[0](x)
        for layer in layers[1:]:
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=reentrant)
        return F.cross_entropy(hidden, y)
    wanted, found = (_trained(Shampoo, at_once=at_once, loss=loss) for at_once in (False, True))
    for one, other in zip(wanted, found, strict=True):
        close(other, one)


@pytest.mark.slow
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_a_step_leaves_no_rows_to_the_garbage_collector(fisher: str) -> None:
    """Rows in a cycle of references stay for several steps, in memory as large as the model."""
    model, (x, y) = _net(), _minibatch(0)
    preconditioner = KFAC(model, fisher=fisher)
    num_alive = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            preconditioner.evaluate_and_step(lambda: F.cross_entropy(model(x), y))
            # exact types: isinstance asks each of a million objects for its class
            num_alive.append(sum(type(one) in (Tensor, nn.Parameter) for one in gc.get_objects()))
    finally:
        gc.enable()
    assert num_alive[2] == num_alive[1]
