"""Parameters of every dtype move as those of a float64 twin, or one typed error refuses them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, NaturalMuon
from ngsgd.errors import ConfigError, DivergenceError, NgsgdWarning
from ngsgd.optim import SGD, Optimizer

# of the change of a parameter in 8 steps: rounding of rows and gradients, which layers enlarge
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
NUM_STEPS = 8
ALL_ADAMW = {"*": {"rule": "adamw"}}
KINDS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda model, **options: SGD(model, 0.2, **options),
    "NGSGD, sum": lambda model, **options: NGSGD(model, 0.2, loss_reduction="sum", **options),
    "NGSGD, mean": lambda model, **options: NGSGD(model, 0.01, loss_reduction="mean", **options),
    "NaturalMuon": lambda model, **options: NaturalMuon(model, 0.01, **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "momentum": {"momentum": 0.5}, "decay": {"weight_decay": 1e-3},
    "no limits": {"max_change": 0.0, "max_param_change": 0.0}, "adamw": {"layer_options": ALL_ADAMW},
}
CASES = [(kind, option) for kind, option in itertools.product(KINDS, OPTIONS)
         # steps of a fixed length have no limits
         if (kind, option) != ("NaturalMuon", "no limits")]


class Net(nn.Module):
    """Matrices longer than a vector register, a 0-d parameter, an odd shape and a zero-size one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(10, 33), nn.LayerNorm(33), nn.Linear(33, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Linear(0, 3)
        self.register_parameter("number", nn.Parameter(torch.tensor([3]), requires_grad=False))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.norm(self.first(x)).tanh()) * self.scale + self.nothing(x[:, :0])


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def minibatch(seed: int, num: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, 10, generator=torch.Generator().manual_seed(seed)).bfloat16().double()
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def step(model: nn.Module, optimizer: Optimizer, seed: int, num_samples: int | None = None) -> None:
    x, y = minibatch(seed)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
    optimizer.step(num_samples=num_samples)


def moves(make: Callable[..., Optimizer], options: dict[str, Any], dtype: torch.dtype, num_steps: int = NUM_STEPS,
          change: Callable[[nn.Module], object] = lambda model: None) -> dict[str, Tensor]:
    """The change of each parameter; `change` acts on the model after half of the steps."""
    model = network().bfloat16().to(dtype)
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    optimizer = make(model, **options)
    for seed in range(num_steps):
        if seed == num_steps // 2:
            change(model)
        step(model, optimizer, seed, 24 if "sum" in str(options.get("loss_reduction")) else None)
    assert optimizer.activity().num_skipped == 0
    return {name: p.detach().double() - start[name] for name, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, move in expected.items():
        if move.numel() and name != "number":
            assert move.norm() > 0.0 and (move.ndim < 2 or found[name].norm() > 0.0), name
            # each step rounds to half a unit of values of at most 1
            rounding = 0.5 * NUM_STEPS * torch.finfo(dtype).eps * move.numel()**0.5
            assert float((found[name] - move).norm()) < TOLERANCES[dtype] * float(move.norm()) + rounding, name


def _marks(kind: str, option: str, dtype: torch.dtype) -> Any:
    is_fast = kind in ("SGD", "NGSGD, mean") and option == "plain" and dtype.itemsize == 2
    return () if is_fast else pytest.mark.slow


@pytest.mark.entry("M1", "parameters are bfloat16, float16 or float64", "works",
                   "SGD, NGSGD and NaturalMuon compute half precision in float32, with velocities and moments in float32, "
                   "and round once; parameters move as in float64 up to the rounding of their dtype")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "option", "dtype"), [
    pytest.param(kind, option, dtype, marks=_marks(kind, option, dtype))
    for kind, option in CASES for dtype in TOLERANCES])
def test_every_optimizer_moves_as_float64(kind: str, option: str, dtype: torch.dtype) -> None:
    found, expected = (moves(KINDS[kind], OPTIONS[option], one) for one in (dtype, torch.float64))
    assert_close(found, expected, dtype)


@pytest.mark.entry("F17")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_follows_the_model_to_another_dtype(kind: str, dtype: torch.dtype) -> None:
    found = moves(KINDS[kind], {"momentum": 0.5}, torch.float32, change=lambda model: model.to(dtype))
    expected = moves(KINDS[kind], {"momentum": 0.5}, torch.float64)
    assert_close(found, expected, dtype if dtype == torch.bfloat16 else torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_of_another_dtype_continues(kind: str, dtype: torch.dtype) -> None:
    models = [network(), network().to(dtype)]
    first, second = (KINDS[kind](model, momentum=0.5) for model in models)
    for seed in range(6):
        if seed == 3:
            models[1].load_state_dict(models[0].state_dict())
            second.load_state_dict(first.state_dict())
            start = [p.detach().double().clone() for p in models[0].parameters()]
        for model, optimizer in zip(models, (first, second), strict=True):
            step(model, optimizer, seed)
    for p, q, old in zip(*(model.parameters() for model in models), start, strict=True):
        if p.numel() and p.requires_grad:
            assert (p - old).norm() > 0.0
            assert float((p - q).norm()) < (0.3 if dtype == torch.bfloat16 else 1e-4) * float((p - old).norm()) + (
                torch.finfo(dtype).eps * 3 * p.numel()**0.5)


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, dtype=dtype, generator=torch.Generator().manual_seed(0)))
        self.linear = nn.Linear(3, 2, dtype=dtype)

    def forward(self) -> Any:
        return self.linear(self.w).abs().square().sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=str)
def test_complex_parameters_move_as_pairs_of_real_numbers(kind: str, options: dict[str, Any]) -> None:
    models = [Complex(torch.complex64), Complex(torch.complex128)]
    models[1].load_state_dict(models[0].state_dict())
    start = [p.detach().clone() for p in models[0].parameters()]
    for model in models:
        optimizer = KINDS[kind](model, **options)
        for _ in range(4):
            optimizer.zero_grad()
            model().backward()
            optimizer.step(num_samples=1)
    for p, q, old in zip(*(model.parameters() for model in models), start, strict=True):
        assert (p - old).imag.norm() > 0.0
        assert (p - q).norm() < 1e-3 * (p - old).norm()


@pytest.mark.entry("F16")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=str)
def test_sparse_gradients_take_dense_steps(kind: str, options: dict[str, Any]) -> None:
    models = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 5, sparse=is_sparse), nn.Linear(5, 3))
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = KINDS[kind](model, **options)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.tensor([1, 1, 4, 2])), torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
        models.append(model)
    for p, q, old in zip(*(model.parameters() for model in models), before, strict=True):
        torch.testing.assert_close(q, p)
        assert not torch.equal(p, old)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dtype_that_no_step_supports_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight = nn.Parameter(torch.zeros(3, 4).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="0"):
        KINDS[kind](model)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_size_zero_train_with_the_others(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 0), nn.Linear(0, 3), nn.Linear(3, 3))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = KINDS[kind](model)
    nn.functional.cross_entropy(model(torch.randn(8, 5)), torch.arange(8) % 3).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    # the biases; the output of the layers below is 0
    assert not torch.equal(model[1].bias, before[3]) and not torch.equal(model[2].bias, before[5])


HUGE: dict[str, tuple[Callable[[nn.Module], Optimizer], torch.dtype]] = {
    "SGD": (lambda model: SGD(model, 1e10, max_change=0.0, max_param_change=0.0), torch.float32),
    "SGD, momentum": (lambda model: SGD(model, 1e10, momentum=0.9, max_change=0.0, max_param_change=0.0), torch.float32),
    "NGSGD": (lambda model: NGSGD(model, 1e10, loss_reduction="mean", max_change=0.0, max_param_change=0.0), torch.float32),
    "SGD, float16": (lambda model: SGD(model, 1e5, max_change=0.0, max_param_change=0.0), torch.float16),
    "SGD, decay": (lambda model: SGD(model, 1e9, weight_decay=1e9, max_change=0.0, max_param_change=0.0), torch.float32),
    "AdamW": (lambda model: SGD(model, 1e10, layer_options={"*": {"rule": "adamw", "weight_decay": 1e5}}), torch.float32),
    "AdamW, float16": (lambda model: SGD(model, 1e6, layer_options=ALL_ADAMW), torch.float16),
    "NaturalMuon": (lambda model: NaturalMuon(model, 1e10, weight_decay=1e5), torch.float32),
    "NaturalMuon, float16": (lambda model: NaturalMuon(model, 1e5), torch.float16),
}


@pytest.mark.entry("M7", "a step is so long that parameters would become infinite", "works",
                   "the minibatch is skipped and counted in `activity().num_skipped`; with `on_nonfinite=\"raise\"` it raises "
                   "DivergenceError. Parameters stay finite")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", HUGE)
def test_parameters_stay_finite_at_any_rate(kind: str) -> None:
    make, dtype = HUGE[kind]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 3)).to(dtype)
    optimizer = make(model)
    for seed in range(40):
        x, _ = minibatch(seed)
        optimizer.zero_grad()
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())
    assert optimizer.activity().num_skipped > 0


@pytest.mark.entry("M7")
def test_a_step_that_is_too_long_raises_if_asked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 3)).half()
    optimizer = SGD(model, 1e6, max_change=0.0, max_param_change=0.0, on_nonfinite="raise")
    model(torch.randn(8, 10).half()).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(NgsgdWarning), pytest.raises(DivergenceError):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


class Mixed(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([nn.Linear(10, 33).double(), nn.Linear(33, 33).bfloat16(), nn.Linear(33, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=str)
def test_layers_of_different_dtypes_move_as_float64(kind: str, options: dict[str, Any]) -> None:
    results = []
    for is_mixed in (True, False):
        torch.manual_seed(0)
        model = Mixed() if is_mixed else Mixed().double()
        start = [p.detach().double().clone() for p in model.parameters()]
        optimizer = KINDS[kind](model, **options)
        for seed in range(4):
            step(model, optimizer, seed)
        results.append([p.detach().double() - old for p, old in zip(model.parameters(), start, strict=True)])
    for found, expected in zip(*results, strict=True):
        assert expected.norm() > 0.0
        rounding = 2 * torch.finfo(torch.bfloat16).eps * expected.numel()**0.5
        assert float((found - expected).norm()) < 0.2 * float(expected.norm()) + rounding
