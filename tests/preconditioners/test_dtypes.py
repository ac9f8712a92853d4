"""Preconditioners with every dtype, sparse and zero gradients: right, or one typed error before."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import deterministic

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS, GradientMaker
from tests.preconditioners.foreign import X, Y, network, steps
from tests.preconditioners.support import SECOND_ORDER
from tests.wired import Wired

# One method of rows, one of gradients; the others run in `make test-all`.
SOME = [pytest.param(method, marks=() if method in ("kfac", "soap") else pytest.mark.slow) for method in METHODS]
# Their directions have a fixed length, also where a gradient is rounding noise only; PSGD, ESGD and
# AdaHessian have random vectors.
NOISY = ("shampoo", "soap", "psgd", "esgd", "adahessian", "muon")
IDS = torch.arange(16) % 7
# Its type stubs lack the switch.
DETERMINISTIC: Any = deterministic


def words(*, sparse: bool) -> Wired:
    """A table of vectors, and an affine layer."""
    torch.manual_seed(0)
    return Wired(lambda m, ids: m.output(m.table(ids).tanh()),
                 table=nn.Embedding(7, 5, sparse=sparse), output=nn.Linear(5, 3))


@pytest.mark.entry("F16", "a layer has sparse gradients, as nn.Embedding(sparse=True)", "works",
                   "SGD, NGSGD, NaturalMuon and preconditioners of gradients take the steps of dense gradients; preconditioners "
                   "of rows and of second derivatives raise ConfigError with the name of the layer, which `skip=` excludes")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("method", SOME)
def test_sparse_gradients_count_as_dense_ones(method: str, at_once: bool) -> None:
    sparse, dense = words(sparse=True), words(sparse=False)
    if METHODS[method].traits.fisher or method in SECOND_ORDER:
        with pytest.raises(ConfigError, match="table"):
            steps(METHODS[method](sparse), sparse, x=IDS, at_once=at_once)
        return
    start = sparse.table.weight.detach().clone()
    found = steps(METHODS[method](sparse), sparse, x=IDS, at_once=at_once)
    for one, other in zip(found, steps(METHODS[method](dense), dense, x=IDS, at_once=at_once), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not torch.equal(sparse.table.weight, start)


@pytest.mark.entry("F16")
@pytest.mark.parametrize("method", SOME)
def test_a_skipped_layer_keeps_its_sparse_gradient(method: str) -> None:
    model = words(sparse=True)
    start = model.output.weight.detach().clone()
    steps(METHODS[method](model, skip=("table",)), model, x=IDS)
    assert model.table.weight.grad is not None and model.table.weight.grad.is_sparse
    assert not torch.equal(model.output.weight, start)


@pytest.mark.entry("F16")
def test_gradients_of_two_calls_of_a_maker_add_up_if_they_are_sparse() -> None:
    model = words(sparse=True)
    found = []
    for preconditioner in (None, METHODS["adam"](model)):
        maker = GradientMaker(model, preconditioner)
        maker.setup_loss_call(nn.functional.cross_entropy, maker.setup_model_call(model, IDS), Y)
        maker.forward_and_backward()
        assert model.table.weight.grad is not None
        found.append(model.table.weight.grad.to_dense().clone())
    # Adam's first step
    assert float((found[1] - found[0]).abs().max()) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("method", SOME)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parameters_move_as_in_float64(method: str, dtype: torch.dtype) -> None:
    found, moves = [], []
    narrow, wide = network(dtype=dtype), network(dtype=torch.float64)
    wide.load_state_dict(narrow.state_dict())
    for model in (narrow, wide):
        before = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        # A gradient of the same values, and one step, so that only the arithmetic differs.
        found.append(steps(METHODS[method](model), model, 2 if method == "soap" else 1, X.to(dtype).double()))
        moves.append(torch.cat([p.detach().flatten() for p in model.parameters()]).double() - before)
    assert bool(moves[0].isfinite().all()) and float(moves[0].norm()) > 0.0
    # A step may be shorter than the distance between two numbers of half precision.
    rounding = torch.finfo(dtype).eps * float(before.norm())
    if method not in NOISY:
        assert float((moves[0] - moves[1]).norm()) <= 0.5 * float(moves[1].norm()) + rounding
    for one, other in zip(*found, strict=True):
        if method in NOISY:
            assert 0.2 * float(other.norm()) <= float(one.norm()) <= 5.0 * float(other.norm())
        elif dtype == torch.float32:
            assert float((one - other).norm()) <= (1e-2 if method == "hessian_free" else 1e-4) * float(other.norm())
        else:
            # Adam's first step is the sign of a gradient; quasi-Newton methods take differences.
            assert float(torch.cosine_similarity(one.flatten(), other.flatten(), dim=0)) >= 0.9
            assert 0.9 * float(other.norm()) <= float(one.norm()) <= 1.1 * float(other.norm())


@pytest.mark.parametrize("method", METHODS)
def test_complex_parameters_are_refused_by_name(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(torch.complex64))
    with pytest.raises(ConfigError, match=r"1\.weight"):
        METHODS[method](model)
    METHODS[method](model, skip=("1",))
    model[1].requires_grad_(False)
    preconditioner = METHODS[method](model)
    model[1].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1\.weight"), preconditioner.watch():
        pass


class WithoutElements(nn.Module):
    """A layer without inputs or outputs next to another one."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")   # of torch: nothing to initialize
            self.empty = nn.Linear(num_inputs, num_outputs)
        self.output = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(x) + self.empty(x[:, :self.empty.in_features]).sum(dim=1, keepdim=True)
        return y


@pytest.mark.entry("F26")
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_layers_without_elements_are_refused_by_name_or_skipped(method: str, sizes: tuple[int, int]) -> None:
    model = WithoutElements(*sizes)
    with pytest.raises(ConfigError, match="empty"):
        METHODS[method](model)
    if method == "kfac":
        before = model.output.weight.detach().clone()
        steps(METHODS[method](model, skip=("empty",)), model)
        assert not torch.equal(model.output.weight, before)


class Gated(nn.Module):
    """A branch whose gate opens at a step, and an output layer that may start at 0."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.down, self.up = nn.Linear(5, 8), nn.Linear(5, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.output = nn.Linear(8, 3)
        self.closed, self.step = {"gate 1": 1, "gate 5": 5}.get(kind, 0), 0
        for weight in {"lora": [self.up.weight], "output": [self.output.weight, self.output.bias]}.get(kind, []):
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output((self.inner(x) + float(self.step >= self.closed) * self.up(self.down(x))).tanh())
        return y


@pytest.mark.entry("F8", "a weight has zero gradients at its first steps: a zero output layer, LoRA with B = 0, a gate that "
                         "opens later", "works",
                   "directions are finite and equal those of float64 in every method and with every interval; Shampoo starts the "
                   "estimate of a tensor at its first nonzero gradient")
@pytest.mark.parametrize("interval", [1, 2, 10])
@pytest.mark.parametrize("kind", ["output", "lora", "gate 1", "gate 5"])
# KFRA refuses branches
@pytest.mark.parametrize("method", [pytest.param(method, marks=() if method == "soap" else pytest.mark.slow)
                                    for method in METHODS if method != "kfra"])
def test_gradients_that_are_zero_at_first(method: str, kind: str, interval: int) -> None:
    every_step = METHODS[method].traits.every_step
    if interval > 1 and every_step:
        pytest.skip("this method updates its curvature in every step")
    options: dict[str, Any] = {} if every_step else {"curvature_interval": interval, "inverse_interval": interval}
    models = [Gated(kind), Gated(kind).double()]
    both = [METHODS[method](model, **options) for model in models]
    generator = torch.Generator().manual_seed(1)
    largest, moved = 0.0, 0.0
    for step in range(14):
        x, target = torch.randn(32, 5, generator=generator), torch.randn(32, 3, generator=generator)
        found = []
        for model, preconditioner in zip(models, both, strict=True):
            model.step = step
            model.zero_grad()
            dtype = model.output.weight.dtype
            preconditioner.evaluate(functools.partial(loss_of, model, x.to(dtype), target.to(dtype)))
            preconditioner.step(lr=1e-3)
            found.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
        one, other = found
        assert bool(one.isfinite().all()) and bool(other.isfinite().all())
        largest = max(largest, float(one.norm()))
        if method not in NOISY:
            assert float((one - other).norm()) <= 1e-2 * float(other.norm()) + 1e-6
        with torch.no_grad():
            for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
                assert p.grad is not None
                p.sub_(p.grad, alpha=1e-3)
                # The same path, so that only the directions differ.
                q.copy_(p)
                moved += float(p.grad.norm())
    # No direction of the size of 1 / 0: Shampoo's was 1e22. Estimates of small first gradients let
    # later ones be large.
    assert moved > 0.0 and largest < 1e10
    assert [one.num_skipped for one in both] == [0, 0]


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), target)


def directions(method: str, fills: bool, at_once: bool) -> list[Tensor]:
    """Directions with or without NaN in all new memory."""
    before = DETERMINISTIC.fill_uninitialized_memory
    torch.use_deterministic_algorithms(fills, warn_only=True)
    DETERMINISTIC.fill_uninitialized_memory = fills
    try:
        model = network(width=20, depth=3)
        options = {} if METHODS[method].traits.every_step else {"curvature_interval": 2, "inverse_interval": 2}
        return steps(METHODS[method](model, **options), model, 5, at_once=at_once)
    finally:
        torch.use_deterministic_algorithms(False)
        DETERMINISTIC.fill_uninitialized_memory = before


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("method", SOME)
def test_no_method_reads_memory_that_was_not_written(method: str, at_once: bool) -> None:
    wanted, found = directions(method, False, at_once), directions(method, True, at_once)
    assert all(torch.equal(one, other) and float(other.norm()) > 0.0 for one, other in zip(found, wanted, strict=True))


def test_new_memory_is_nan_in_the_test_above() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert DETERMINISTIC.fill_uninitialized_memory and bool(torch.empty(64).isnan().all())
    finally:
        torch.use_deterministic_algorithms(False)
