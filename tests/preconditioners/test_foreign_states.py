"""A state that does not fit is refused before anything changes, by every preconditioner."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError, OptimizerStateError
from ngsgd.preconditioners import METHODS, PSGD, FullNG, Preconditioner
from tests.preconditioners.foreign import LR, X, damaged, network, steps, trained
from tests.preconditioners.support import FEATURES, Feature, made

ALL = tuple(METHODS)
# One method of rows, one of gradients; the others run in `make test-all`.
SOME = [pytest.param(method, marks=() if method in ("kfac", "adam") else pytest.mark.slow) for method in ALL]
# Estimates that another dtype would make wrong.
ONE_DTYPE = ("soap",)
# Random vectors differ between dtypes.
RANDOM = ("psgd", "esgd", "adahessian")


def flat(preconditioner: Preconditioner) -> dict[tuple[str, str], Tensor]:
    return {(name, key): torch.as_tensor(value).clone() for name, entry in preconditioner.state_dict().items()
            for key, value in entry.items()}


def require_equal(one: dict[tuple[str, str], Tensor], other: dict[tuple[str, str], Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def refused(preconditioner: Preconditioner, state: Any) -> None:
    """The state is refused, and the preconditioner is as before."""
    before = flat(preconditioner)
    with pytest.raises(OptimizerStateError):
        preconditioner.load_state_dict(state)
    require_equal(flat(preconditioner), before)


@pytest.mark.entry("F18", "you load a state of another width, number of layers or method, or a damaged one, into a preconditioner",
                   "error", "OptimizerStateError with both sides, before anything changes")
@pytest.mark.parametrize("other", [pytest.param(other, marks=() if other in ("ekfac", "diagonal", "adamw") else pytest.mark.slow)
                                   for other in ALL])
@pytest.mark.parametrize("method", SOME)
def test_a_state_of_another_method_is_refused(method: str, other: str) -> None:
    if method != other:
        refused(trained_once(method), trained_once(other).state_dict())


@functools.cache
def trained_once(method: str) -> Preconditioner:
    return trained(method)[1]


@pytest.mark.entry("F18")
@pytest.mark.parametrize("method", SOME)
def test_a_state_of_another_network_is_refused(method: str) -> None:
    own_model, own = trained(method)
    for width, depth in ((12, 2), (64, 2), (1500, 2), (8, 3), (8, 4)):
        wide = METHODS[method](network(width, depth))
        refused(wide, own.state_dict())
    model = torch.optim.AdamW(own_model.parameters())
    model.step()
    refused(own, model.state_dict())
    smaller = network(8, 3)
    larger_state = METHODS[method](smaller)
    steps(larger_state, smaller)
    refused(own, larger_state.state_dict())


@pytest.mark.entry("F18")
@pytest.mark.parametrize("method", SOME)
def test_a_damaged_state_is_refused(method: str) -> None:
    model, own = trained(method)
    state = trained(method)[1].state_dict()
    before = flat(own)
    accepted = []
    for what, other in damaged(state, every=3 if method in ("kfac", "adam") else 1):
        try:
            own.load_state_dict(other)
            accepted.append(what)
        except OptimizerStateError:
            pass
    assert accepted == []
    require_equal(flat(own), before)
    own.load_state_dict(state)
    require_equal(flat(own), {(name, key): torch.as_tensor(value) for name, entry in state.items() for key, value in entry.items()})
    assert own.statistics.weights == {name: entry["weight"] for name, entry in state.items() if "weight" in entry}
    steps(own, model, 1)


@pytest.mark.entry("F17", "you load a float32 state into a float64 model or the reverse, or convert the model between two steps",
                   "works", "velocities and estimates are converted and equal a float64 twin; half precision keeps them in "
                            "float32; SOAP refuses such a state, and starts again after a conversion")
@pytest.mark.parametrize("way", ["load", "convert"])
@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("method", SOME)
def test_a_state_of_another_dtype_is_converted_or_refused(method: str, before: torch.dtype, after: torch.dtype, way: str) -> None:
    model, own = trained(method, dtype=before)
    state = own.state_dict()
    twin_model = network(dtype=after)
    twin_model.load_state_dict(model.state_dict())
    start = [p.detach().clone() for p in twin_model.parameters()]
    if way == "convert":
        twin_model = model.to(after)
        twin = own
    else:
        twin = METHODS[method](twin_model)
        if method in ONE_DTYPE:
            refused(twin, state)
            return
        twin.load_state_dict(state)
    found = steps(twin, twin_model, 1)
    assert all(bool(g.isfinite().all()) for g in found)
    if method in ONE_DTYPE or method in RANDOM:
        found = steps(twin, twin_model, 1)
        assert all(bool(g.isfinite().all()) and float(g.norm()) > 0.0 for g in found)
        return
    # A twin that had one dtype from the start.
    wanted_model, wanted = trained(method, dtype=torch.float64)
    for one, other in zip(found, steps(wanted, wanted_model, 1), strict=True):
        assert float((one - other).norm()) <= 5e-3 * float(other.norm())
    assert all(not torch.equal(p, q) for p, q in zip(twin_model.parameters(), start, strict=True))


@pytest.mark.entry("F17")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", SOME)
def test_a_model_may_become_half_precise(method: str, half: torch.dtype) -> None:
    model, own = trained(method)
    before = [p.detach().clone() for p in model.parameters()]
    found = steps(own, model.to(half), 2)
    assert all(bool(g.isfinite().all()) and float(g.norm()) > 0.0 for g in found)
    assert all(not torch.equal(p.float(), q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(value.dtype != half for entry in own.statistics.values() for value in entry.values())


def wider_head(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 7)


def wider_layers(model: nn.Sequential) -> None:
    model[0], model[2] = nn.Linear(5, 40), nn.Linear(40, 3)


def another_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


def frozen_layer(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def frozen_bias(model: nn.Sequential) -> None:
    model.get_parameter("2.bias").requires_grad_(False)


CHANGES = (wider_head, wider_layers, another_layer, frozen_layer, frozen_bias)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", SOME)
def test_layers_may_change_between_two_steps(method: str, change: Any, interval: int) -> None:
    every_step = METHODS[method].traits.every_step
    if interval > 1 and every_step:
        pytest.skip("this method updates its curvature in every step")
    model = network()
    options = {} if every_step else {"curvature_interval": interval, "inverse_interval": interval}
    own = METHODS[method](model, **options)
    steps(own, model, 2)
    change(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    steps(own, model, 4)
    parameters = dict(model.named_parameters())
    assert all(bool(parameters[name].isfinite().all()) and not torch.equal(parameters[name], p) for name, p in before.items())
    copied = METHODS[method](model, **options)
    copied.load_state_dict(own.state_dict())
    for p in model.parameters():
        p.requires_grad_(True)
    steps(own, model, 2)


@pytest.mark.parametrize("make", [FullNG, lambda model, **options: PSGD(model, form="full", **options)])
def test_a_matrix_of_several_layers_is_not_used_for_other_ones(make: Any) -> None:
    """The layers have one size, so that sizes alone do not show it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)})
    own = make(model, curvature_interval=2)
    for name in ("a", "a"):
        model.zero_grad()
        own.evaluate(lambda name=name: nn.functional.cross_entropy(model[name](X), torch.arange(16) % 3))
        own.step()
    model.zero_grad()
    own.evaluate(lambda: nn.functional.cross_entropy(model["b"](X), torch.arange(16) % 3))
    own.step()
    g = model.get_parameter("b.weight").grad
    assert g is not None and float(g.norm()) > 0.0
    model.zero_grad()
    own.evaluate(lambda: nn.functional.cross_entropy(model["a"](X), torch.arange(16) % 3))
    with pytest.raises(ConfigError, match=r"a\.weight"):
        own.step()


def test_the_mean_of_states_of_two_networks_is_refused() -> None:
    (_, one), (_, other) = trained("kfac"), trained("kfac", width=12)
    for states in ([one.state_dict(), other.state_dict()], [one.state_dict(), trained("ekfac")[1].state_dict()]):
        with pytest.raises(OptimizerStateError):
            one.average(states)
    with pytest.raises(ConfigError):
        one.average([])


def test_an_option_that_changes_shapes_is_noticed() -> None:
    model = network()
    own = METHODS["shampoo"](model, block_size=4)
    steps(own, model)
    refused(METHODS["shampoo"](model, block_size=8), own.state_dict())


@pytest.mark.parametrize("feature", [
    pytest.param(feature, marks=() if feature.label == "Linear" else pytest.mark.slow, id=feature.label)
    for feature in FEATURES if feature.loop in ("", "bfloat16")])
@pytest.mark.parametrize("method", SOME)
def test_the_own_state_of_every_kind_of_layer_is_accepted(method: str, feature: Feature) -> None:
    if feature.refuses(method):
        pytest.skip("the method refuses the layer")
    model, _, x, y = made(feature)

    def step(preconditioner: Preconditioner) -> list[Tensor]:
        model.zero_grad()
        preconditioner.evaluate(lambda: nn.functional.cross_entropy(model(x), y))
        preconditioner.step(lr=LR)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]
    own, other = METHODS[method](model), METHODS[method](model)
    for _ in range(3):
        step(own)
    other.load_state_dict(own.state_dict())
    require_equal(flat(other), flat(own))
    found, wanted = step(other), step(own)
    assert all(torch.equal(one, another) for one, another in zip(found, wanted, strict=True))
    assert any(float(g.norm()) > 0.0 for g in wanted)
