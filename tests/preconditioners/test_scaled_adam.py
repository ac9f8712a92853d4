"""ScaledAdam against its formulas in float64, clipping, limits, restart and mistakes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError, DivergenceError, OptimizerStateError
from ngsgd.preconditioners import Adam, ScaledAdam
from tests.reference.scaled_adam import Array, ScaledAdamByDefinition

Gradients = Callable[[int], dict[str, Tensor]]


class _Tensors(nn.Module):
    """Matrices of one shape, a vector, two scalars, a tiny tensor, a zero one and a large one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64))
        self.one, self.two, self.vector = parameter(4, 3), parameter(4, 3, scale=0.1), parameter(5)
        self.scalar, self.element = nn.Parameter(torch.tensor(0.5, dtype=torch.float64)), parameter(1)
        self.tiny, self.zero = parameter(6, scale=1e-7), parameter(3, scale=0.0)
        self.large, self.far = parameter(2, 2, 2, scale=2.9), nn.Parameter(torch.tensor([9.99], dtype=torch.float64))


def random_gradients(model: nn.Module) -> Gradients:
    """Gradients that drift, with outliers that are clipped."""
    def gradients(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        scale = 30.0 if step % 17 == 5 else 1.0 + step / 200.0
        return {name: scale * (torch.randn(p.shape, generator=generator, dtype=torch.float64) - 0.4)
                for name, p in model.named_parameters()}
    return gradients


def rate(step: int) -> float:
    """A rate that changes in every step, so that momentum holds updates of other rates."""
    return float(0.045 * (1.0 + step / 100.0) ** -0.5)


def take_steps(preconditioner: ScaledAdam, gradients: Gradients, steps: range,
               lr: Callable[[int], float] = rate) -> None:
    optimizer = torch.optim.SGD(preconditioner.model.parameters(), lr=1.0)
    for step in steps:
        for name, p in preconditioner.model.named_parameters():
            p.grad = gradients(step)[name].to(p.dtype)
        optimizer.param_groups[0]["lr"] = lr(step)
        preconditioner.step(lr(step))
        optimizer.step()


def arrays(values: dict[str, Tensor]) -> dict[str, Array]:
    return {name: value.detach().double().numpy() for name, value in values.items()}


def _by_definition(model: nn.Module, gradients: Gradients, steps: range,
                   lr: Callable[[int], float] = rate, **options: Any) -> ScaledAdamByDefinition:
    wanted = ScaledAdamByDefinition(arrays(dict(model.named_parameters())), **options)
    for step in steps:
        wanted.step(arrays(gradients(step)), lr(step))
    return wanted


def _require_equal(model: nn.Module, wanted: ScaledAdamByDefinition, rtol: float) -> None:
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().double().numpy(), wanted.params[name], rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("clipping_scale", [2.0, 0.0])
# float32 has 24 bits, and the rounding of 500 steps adds up
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_500_steps_equal_the_formulas(dtype: torch.dtype, rtol: float, clipping_scale: float) -> None:
    model = _Tensors()
    wanted = _by_definition(model, random_gradients(model), range(500), clipping_scale=clipping_scale)
    model.to(dtype)
    preconditioner = ScaledAdam(model, clipping_scale=clipping_scale)
    take_steps(preconditioner, random_gradients(model), range(500))
    _require_equal(model, wanted, rtol)
    # the case contains clipped minibatches and scalars at their limit
    assert any(factor < 1.0 for factor in wanted.clipped[:100]) == bool(clipping_scale)
    assert abs(float(wanted.params["far"][0])) == 10.0 or dtype == torch.float32
    assert preconditioner.num_skipped == 0


@pytest.mark.parametrize("lr", [0.001, 3.0])
def test_changes_of_the_scale_are_limited(lr: float) -> None:
    """At rate 3 every change of a scale is limited to 10 % and by the maximum of r."""
    model = _Tensors()
    gradients = random_gradients(model)
    wanted = _by_definition(model, gradients, range(40), lambda step: lr, betas=(0.5, 0.9), eps=1e-4)
    take_steps(ScaledAdam(model, momentum=0.5, ema_decay=0.9, damping=1e-4), gradients, range(40), lambda step: lr)
    _require_equal(model, wanted, 1e-9)


def test_a_growing_tensor_stays_at_the_maximum() -> None:
    model = nn.Module()
    model.large = nn.Parameter(torch.full((4,), 2.99, dtype=torch.float64))
    # this gradient makes the tensor grow
    take_steps(ScaledAdam(model, momentum=0.0), lambda step: {"large": torch.tensor([-1.0, -1.0, 1.0, -1.0]).double()},
               range(200), lambda step: 0.001)
    # the limit is on the change of the scale; a step of 0.001 r itself is not limited
    assert float(model.large.detach().square().mean().sqrt()) < 3.5


def test_the_direction_of_sgd_at_the_rate_is_the_step() -> None:
    model = nn.Linear(3, 2)
    preconditioner = ScaledAdam(model)
    model(torch.randn(5, 3)).square().sum().backward()
    preconditioner.step(lr=0.045)
    # the first step of Adam has the length of the rate, times 1 - beta 1, in each element
    for p in model.parameters():
        assert p.grad is not None
        r = p.detach().square().mean().sqrt()
        torch.testing.assert_close(p.grad.abs(), (0.1 * r).expand(p.shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 5, 60])
def test_a_gradient_that_is_not_finite_counts_as_zeros(bad: float, at: int) -> None:
    model = _Tensors()
    plain = random_gradients(model)

    def gradients(step: int) -> dict[str, Tensor]:
        found = plain(step)
        if step == at:
            found["vector"][2] = bad
        return found
    wanted = _by_definition(model, gradients, range(80))
    preconditioner = ScaledAdam(model)
    with pytest.warns(UserWarning, match="ScaledAdam"):
        take_steps(preconditioner, gradients, range(80))
    _require_equal(model, wanted, 1e-10)
    assert preconditioner.num_skipped == 1


def test_too_many_gradients_that_are_not_finite_raise() -> None:
    model = nn.Linear(2, 2)
    preconditioner = ScaledAdam(model)
    with pytest.raises(DivergenceError), pytest.warns(UserWarning, match="ScaledAdam"):
        take_steps(preconditioner, lambda step: {name: torch.full_like(p, float("nan")) for name, p in model.named_parameters()},
                   range(20))


@pytest.mark.parametrize("at", [3, 45, 130])
def test_a_restart_is_bitwise_identical(at: int) -> None:
    whole, parted = _Tensors().float(), _Tensors().float()
    take_steps(ScaledAdam(whole), random_gradients(whole), range(150))
    before = ScaledAdam(parted)
    take_steps(before, random_gradients(parted), range(at))
    state = copy.deepcopy(before.state_dict())
    take_steps(before, random_gradients(parted), range(at, at + 1))   # a state is a copy
    again = _Tensors().float()
    take_steps(ScaledAdam(again), random_gradients(again), range(at))
    after = ScaledAdam(again)
    after.load_state_dict(state)
    take_steps(after, random_gradients(again), range(at, 150))
    for p, wanted in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, wanted)


def test_tensors_in_one_model_and_in_separate_ones_take_the_same_steps() -> None:
    joint = _Tensors()
    gradients = random_gradients(joint)
    take_steps(ScaledAdam(joint, clipping_scale=0.0), gradients, range(30))
    for name, p in _Tensors().named_parameters():
        alone = nn.Module()
        alone.register_parameter(name, nn.Parameter(p.detach().clone()))
        take_steps(ScaledAdam(alone, clipping_scale=0.0), gradients, range(30))
        assert torch.equal(alone.get_parameter(name), joint.get_parameter(name))


def test_parameters_without_gradient_keep_their_state_and_start_later() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    preconditioner = ScaledAdam(model)
    model[0](torch.randn(3, 2)).sum().backward()
    preconditioner.step(lr=0.01)
    assert {name for name, entry in preconditioner.state_dict().items() if entry.get("weight")} == {"0.weight", "0.bias"}
    model.zero_grad()
    model(torch.randn(3, 2)).square().sum().backward()
    preconditioner.step(lr=0.01)
    p = model.get_parameter("1.weight")
    assert p.grad is not None
    torch.testing.assert_close(p.grad.abs(), (0.1 * p.detach().square().mean().sqrt()).expand(p.shape))


def test_mistakes_are_reported() -> None:
    model = nn.Linear(2, 2)
    preconditioner = ScaledAdam(model)
    model(torch.ones(1, 2)).sum().backward()
    for lr in (None, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"step\(lr="):
            preconditioner.step(lr)
    for wrong in ({"clipping_scale": -1.0}, {"momentum": 1.0}, {"min_rms": 0.0}, {"curvature_interval": 2},
                  {"layer_options": {"": {"damping": 1.0}}}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ScaledAdam(model, **wrong)
    with pytest.raises(OptimizerStateError):
        preconditioner.load_state_dict(Adam(model).state_dict())


@pytest.mark.parametrize(("min_rms", "warns"), [(1e-5, True), (0.02, False)])
def test_a_matrix_of_zeros_grows_with_min_rms(min_rms: float, warns: bool) -> None:
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        take_steps(ScaledAdam(model, min_rms=min_rms), lambda step: {"weight": torch.ones(2, 3)}, range(4), lambda step: 0.1)
    assert len(caught) == warns
    # Adam's steps of a constant gradient, in the momentum with weight 1 - 0.9^n
    wanted = -0.1 * min_rms * sum(1.0 - 0.9 ** n for n in range(1, 5))
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), wanted), rtol=1e-4, atol=0.0)


def test_a_rate_of_zero_takes_no_step() -> None:
    model = _Tensors()
    preconditioner = ScaledAdam(model)
    take_steps(preconditioner, random_gradients(model), range(3))
    before = copy.deepcopy(model.state_dict())
    take_steps(preconditioner, random_gradients(model), range(3, 4), lambda step: 0.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
