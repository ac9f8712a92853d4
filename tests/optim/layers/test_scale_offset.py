"""Normalization under NGSGD: torch's but for scale and offset, sums of preconditioned rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, OnlineNaturalGradient
from ngsgd.optim.layers.scale_offset import NaturalGradientNorm
from tests.reference.kronecker import expected_scale

# float64; the normalized input comes from another kernel than the plain layer's, and the affine
# part is a separate step
PLAIN: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
# an update squares the condition number of the Fisher matrix (at most 1 / delta = 2000): 4e6
# roundings of 1e-16
EQUAL: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-9}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]        # of the input
    channels_second: bool = True  # or the parameters lie along the last dimensions


CASES = {
    "layer_norm": Case(lambda: nn.LayerNorm(7), (5, 6, 7), channels_second=False),
    "layer_norm_wide": Case(lambda: nn.LayerNorm(40), (30, 40), channels_second=False),
    "layer_norm_many_rows": Case(lambda: nn.LayerNorm(40), (20, 30, 40), channels_second=False),
    "batch_norm_many_rows": Case(lambda: nn.BatchNorm2d(6), (200, 6, 8, 10)),
    "layer_norm_2_dims": Case(lambda: nn.LayerNorm((3, 4)), (9, 3, 4), channels_second=False),
    "layer_norm_no_bias": Case(lambda: nn.LayerNorm(7, bias=False), (12, 7), channels_second=False),
    "layer_norm_2_dims_no_bias": Case(lambda: nn.LayerNorm((3, 4), bias=False), (2, 5, 3, 4), channels_second=False),
    "rms_norm": Case(lambda: nn.RMSNorm(7), (5, 6, 7), channels_second=False),
    "rms_norm_2_dims": Case(lambda: nn.RMSNorm((3, 4), eps=1e-3), (9, 3, 4), channels_second=False),
    "group_norm": Case(lambda: nn.GroupNorm(2, 6), (4, 6, 5)),
    "group_norm_of_vectors": Case(lambda: nn.GroupNorm(2, 6), (11, 6)),
    "group_norm_of_images": Case(lambda: nn.GroupNorm(3, 6), (4, 6, 3, 2)),
    "batch_norm_2d_input": Case(lambda: nn.BatchNorm1d(6), (13, 6)),
    "batch_norm_3d_input": Case(lambda: nn.BatchNorm1d(6, eps=1e-3), (4, 6, 5)),
    "batch_norm_of_images": Case(lambda: nn.BatchNorm2d(6, momentum=0.3), (4, 6, 3, 2)),
    "batch_norm_of_volumes": Case(lambda: nn.BatchNorm3d(4), (3, 4, 3, 2, 2)),
    "batch_norm_cumulative": Case(lambda: nn.BatchNorm1d(6, momentum=None), (13, 6)),
    "batch_norm_without_statistics": Case(lambda: nn.BatchNorm1d(6, track_running_stats=False), (13, 6)),
}
# of rows, above which sums of rows are preconditioned
MANY_PRODUCTS = 1 << 18
ALL = pytest.mark.parametrize("name", CASES)
BATCH_NORMS = pytest.mark.parametrize("name", [name for name in CASES if name.startswith("batch_norm")])


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = 1.0 + torch.arange(shape[-1], dtype=torch.float64)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * size + 0.5


def twins(case: Case) -> tuple[Any, Any, NGSGD]:
    """(plain, with natural gradient, its optimizer), same parameters, which are not 1 and 0."""
    layer = case.make().double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    plain = copy.deepcopy(layer)
    return plain, layer, NGSGD(layer, lr=0.1)


def run(layer: Any, x: Tensor, dY: Tensor) -> tuple[Tensor, Tensor]:
    """(output, gradient of the input) of one minibatch."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dY)
    assert x.grad is not None
    return y.detach(), x.grad


class Reference:
    """Sums of preconditioned rows, dY xhat for the scale and dY for the offset."""

    def __init__(self, plain: Any, case: Case) -> None:
        self.plain, self.case = plain, case
        self.dim = plain.weight.numel()
        self.scale_side, self.offset_side = (OnlineNaturalGradient(min(20, (self.dim + 1) // 2), update_period=4) for _ in range(2))

    def normalised(self, y: Tensor) -> Tensor:
        """The output without its affine part."""
        bias = getattr(self.plain, "bias", None)
        shape = (-1, *[1] * (y.ndim - 2)) if self.case.channels_second else self.plain.weight.shape
        y = y if bias is None else y - bias.detach().view(shape)
        scale: Tensor = self.plain.weight.detach().view(shape)
        return y / scale

    def rows(self, x: Tensor) -> Tensor:
        if self.case.channels_second and x.ndim > 2:
            x = torch.stack([channel.flatten() for channel in x.unbind(1)], dim=1)
        return x.reshape(-1, self.dim)

    def gradients(self, y: Tensor, dY: Tensor) -> tuple[Tensor, Tensor]:
        return (self.of_rows(self.scale_side, self.rows(dY * self.normalised(y))),
                self.of_rows(self.offset_side, self.rows(dY)))

    def of_rows(self, side: OnlineNaturalGradient, rows: Tensor) -> Tensor:
        """The rescaled sum; gamma is the expected one of many rows without update."""
        num_sides = 1 if getattr(self.plain, "bias", None) is None else 2
        expects = num_sides * len(rows) * self.dim * min(20, (self.dim + 1) // 2) > MANY_PRODUCTS
        expected = expected_scale(side) if expects and not side.updates_now() else None
        found, scale = side.precondition(rows)
        return ((scale if expected is None else expected) * found.sum(dim=0)).view(self.plain.weight.shape)


def check(name: str, num_minibatches: int, *, training: bool = True) -> None:
    case = CASES[name]
    plain, layer, _optimizer = twins(case)
    assert issubclass(type(layer), NaturalGradientNorm)
    if not training:  # statistics that are not 0 and 1
        for t in range(3):
            run(plain, noise(case.shape, seed=100 + t), noise(case.shape, seed=200 + t))
        layer.load_state_dict(plain.state_dict())
    plain.train(training)
    layer.train(training)
    reference = Reference(plain, case)
    for t in range(num_minibatches):
        x, dY = noise(case.shape, seed=2 * t), noise(case.shape, seed=2 * t + 1)
        (y_plain, dx_plain), (y, dx) = run(plain, x, dY), run(layer, x, dY)
        torch.testing.assert_close(y, y_plain, **PLAIN)
        torch.testing.assert_close(dx, dx_plain, **PLAIN)
        d_scale, d_offset = reference.gradients(y_plain, dY)
        torch.testing.assert_close(layer.weight.grad, d_scale, **EQUAL)
        if getattr(layer, "bias", None) is not None:
            torch.testing.assert_close(layer.bias.grad, d_offset, **EQUAL)
        for buffer, buffer_plain in zip(layer.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(buffer, buffer_plain, **PLAIN)
    # guards the above: were nothing preconditioned, equality would say little
    assert float((layer.weight.grad - plain.weight.grad).norm()) > 1e-3 * float(plain.weight.grad.norm())


@pytest.mark.entry("N6", "the model has a LayerNorm, RMSNorm, GroupNorm or BatchNorm with scale "
                         "and offset", "works",
                   "natural gradient of both; outputs and running statistics are torch's")
@ALL
def test_forward_input_gradient_and_statistics_are_torchs_and_parameters_get_sums_of_preconditioned_rows(name: str) -> None:
    check(name, num_minibatches=17)  # updates in calls 0 to 10 and 14


@BATCH_NORMS
def test_batch_norm_in_eval_mode_uses_and_keeps_the_running_statistics(name: str) -> None:
    check(name, num_minibatches=4, training=False)


@ALL
def test_without_gradients_the_forward_pass_is_the_plain_one(name: str) -> None:
    plain, layer, optimizer = twins(CASES[name])
    x = noise(CASES[name].shape, seed=0)
    for training in (True, False):
        plain.train(training)
        layer.train(training)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), plain(x), **PLAIN)
    assert all(preconditioner.num_calls == 0 for _, preconditioner in optimizer.preconditioners())


@ALL
def test_frozen_parameters_get_no_gradient_and_leave_the_other_alone(name: str) -> None:
    case = CASES[name]
    plain, layer, _optimizer = twins(case)
    x, dY = noise(case.shape, seed=0), noise(case.shape, seed=1)
    run(plain, x, dY)
    run(layer, x, dY)
    for frozen in [key for key, _ in layer.named_parameters()]:
        _, other, _other_optimizer = twins(case)
        other.get_parameter(frozen).requires_grad_(False)
        _, dx = run(other, x, dY)
        torch.testing.assert_close(dx, run(copy.deepcopy(plain), x, dY)[1], **PLAIN)
        for key, p in other.named_parameters():
            assert (p.grad is None) == (key == frozen)
            if p.grad is not None:
                assert torch.equal(p.grad, layer.get_parameter(key).grad)


@pytest.mark.entry("N10", "the weight of a layer is frozen and its bias is not", "works",
                   "the bias has its plain gradient, and AdamW trains it")
def test_an_offset_alone_gets_its_plain_gradient() -> None:
    plain, layer, optimizer = twins(CASES["layer_norm"])
    optimizer.detach()
    layer.weight.requires_grad_(False)
    optimizer = NGSGD(layer, lr=0.1, fallback="adamw")
    assert optimizer.preconditioned == [] and len(optimizer.fallbacks) == 1
    x, dY = noise((5, 7), seed=0), noise((5, 7), seed=1)
    run(plain, x, dY)
    run(layer, x, dY)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad, **PLAIN)


def test_a_norm_without_parameters_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.BatchNorm1d(4, affine=False))
    optimizer = NGSGD(model, lr=0.1)
    assert optimizer.preconditioned == ["0"]
    assert type(model[1]) is nn.LayerNorm and type(model[2]) is nn.BatchNorm1d


# --- what people do with models ---

def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(30, 8),
                         nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(model: nn.Module, seeds: range, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = NGSGD(model, lr=0.01) if optimizer is None else optimizer
    for seed in seeds:
        optimizer.zero_grad()
        x = noise((8, 3, 7), seed).to(next(model.parameters()))
        (model(x) - x[:, 0, :2]).square().sum().backward()
        optimizer.step()


def equal_states(a: nn.Module, b: nn.Module) -> bool:
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_names_in_the_state_dict_do_not_change() -> None:
    model = network()
    names, children = list(model.state_dict()), [name for name, _ in model.named_modules()]
    _optimizer = NGSGD(model, lr=0.1)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == children


def test_the_model_can_change_dtype_while_it_trains() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01)
    train(model, range(3), optimizer)
    model.to(torch.float64)
    before = model.get_buffer("1.running_mean").clone()
    train(model, range(3, 6), optimizer)
    after = model.get_buffer("1.running_mean")
    assert after.dtype == torch.float64 and not torch.equal(after, before)
    assert all(p.dtype == torch.float64 and bool(p.isfinite().all()) for p in model.parameters())


def test_a_deep_copy_has_separate_statistics_and_estimates() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01)
    train(model, range(3), optimizer)
    twin = copy.deepcopy(model)
    assert equal_states(model, twin)
    before = copy.deepcopy(model.state_dict())
    fisher = {name: p.state_dict() for name, p in optimizer.preconditioners()}
    train(twin, range(3, 6), torch.optim.SGD(twin.parameters(), lr=0.01))
    train(twin, range(6, 9))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, preconditioner in optimizer.preconditioners():
        assert preconditioner.num_calls == 3 and torch.equal(preconditioner.state_dict()["W"], fisher[name]["W"])
    assert not torch.equal(twin.get_buffer("1.running_mean"), model.get_buffer("1.running_mean"))


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict_reaches_the_statistics_in_use(assign: bool) -> None:
    source, model = network(), network()
    train(source, range(3))
    _optimizers = NGSGD(source, lr=0.01), NGSGD(model, lr=0.01)
    model.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    model.eval()
    source.eval()
    x = noise((8, 3, 7), 9).float()
    assert torch.equal(model(x), source(x))


def test_detach_gives_back_plain_layers_with_the_statistics_so_far() -> None:
    model, plain = network(), network()
    classes = [type(layer) for layer in model]
    optimizer = NGSGD(model, lr=0.0)
    train(model, range(3), optimizer)
    train(plain, range(3), torch.optim.SGD(plain.parameters(), lr=0.0))
    optimizer.detach()
    assert [type(layer) for layer in model] == classes
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(model, plain, strict=True))
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)  # float32 rounding of the layers before
    train(model, range(3, 4), torch.optim.SGD(model.parameters(), lr=0.01))


def test_later_optimizers_remove_the_state_of_earlier_ones() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    sizes = []
    for _ in range(5):
        _optimizer = NGSGD(model, lr=0.1)
        sizes.append(len(pickle.dumps(model)))
    assert max(sizes) - min(sizes) < 20  # bytes; layers are numbered, and numbers have digits


def test_hooks_run_once() -> None:
    """On the layer, not once more on the twin that normalizes."""
    model = network()
    calls: list[str] = []
    model[6].register_forward_hook(lambda *_: calls.append("forward, before"))
    model[6].register_full_backward_hook(lambda *_: calls.append("backward, before"))
    _optimizer = NGSGD(model, lr=0.1)
    model[6].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model[6].register_full_backward_hook(lambda *_: calls.append("backward"))
    model(noise((8, 3, 7), 0).float()).sum().backward()
    assert sorted(calls) == ["backward", "backward, before", "forward, before", "pre"]


@pytest.mark.parametrize("first", ["optimiser", "setting"])
def test_settings_of_a_batch_norm_hold_whenever_they_are_made(first: str) -> None:
    """Changed momentum and epsilon reach the twin that normalizes, also later."""
    model, plain = network(), network()
    if first == "optimiser":
        _optimizer = NGSGD(model, lr=0.1)
    for each in (model, plain):
        each[1].momentum = each[8].momentum = 0.5  # type: ignore[assignment]
        each[1].eps = 0.1  # type: ignore[assignment]
    if first == "setting":
        _optimizer = NGSGD(model, lr=0.1)
    x = noise((8, 3, 7), 0).float()
    # float32: means of 40 numbers
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)
    torch.testing.assert_close(model[8].running_var, plain[8].running_var, rtol=1e-4, atol=1e-5)


def unusual(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    return {"no rows": (0, *shape[1:]), "one value": (1, shape[1], *[1] * (len(shape) - 2)),
            "other channels": (*shape[:1], 5, *shape[2:]), "other elements": (*shape[:-1], shape[-1] + 1),
            "one dimension": shape[-1:]}[kind]


@pytest.mark.parametrize("kind", ["no rows", "one value", "other channels", "other elements", "one dimension"])
@ALL
def test_unusual_shapes_give_the_values_and_errors_of_torch(name: str, kind: str) -> None:
    plain, layer, _optimizer = twins(CASES[name])
    outcomes: list[tuple[Any, Any, Any]] = []
    for module in (plain, layer):
        x = noise(unusual(CASES[name].shape, kind), 0).requires_grad_()
        try:
            y = module(x)
            y.sum().backward()
        except (RuntimeError, ValueError, IndexError) as error:
            outcomes.append((type(error), None, None))
        else:
            outcomes.append((None, y.detach(), x.grad))
    assert outcomes[0][0] == outcomes[1][0]
    torch.testing.assert_close(outcomes[1][1:], outcomes[0][1:], **PLAIN)
