"""The optimizer in a plain loop: next to torch's and this package's SGD, and back again."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ArgumentError, ConfigError, OptimizerStateError, ReversalError
from ngsgd.hypergrad import ReversibleSGD
from ngsgd.optim import SGD
from tests.preconditioners.test_dtypes import words

X_ND = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y_N = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(1))


def network(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 4)).to(dtype)


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Callable[[], Tensor]:
    def evaluate() -> Tensor:
        torch.manual_seed(step)
        rows = slice(16 * (step % 4), 16 * (step % 4) + 16)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X_ND[rows].to(next(model.parameters()).dtype)), Y_N[rows])
        loss.backward()
        return loss
    return evaluate


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("nesterov", [False, True])
def test_trajectory_equals_torch_sgd(nesterov: bool) -> None:
    ours, theirs = network(), network()
    one = ReversibleSGD(ours, 0.5, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    # torch's velocity takes the complete gradient, ours a share of 1 - momentum
    other = torch.optim.SGD(theirs.parameters(), 0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    for step in range(100):
        one.step(closure(ours, one, step))
        other.step(closure(theirs, other, step))
    assert float((vector(ours) - vector(theirs)).abs().max()) < 1e-10


def test_trajectory_equals_our_sgd_with_limits() -> None:
    ours, theirs = network(), network()
    one = ReversibleSGD(ours, 0.5, momentum=0.8, max_change=0.05, max_param_change=0.06, weight_decay=0.02)
    # of |w|^2, not half of it
    other = SGD(theirs, 0.5, momentum=0.8, max_change=0.05, max_param_change=0.06, weight_decay=0.01)
    for step in range(60):
        one.step(closure(ours, one, step))
        closure(theirs, other, step)()
        other.step(num_samples=1)
    assert other.activity().model_share > 0.1
    assert float((vector(ours) - vector(theirs)).abs().max()) < 1e-9


CASES: list[dict[str, Any]] = [
    {}, {"momentum": 0.0}, {"weight_decay": 0.02, "max_change": 0.02, "max_param_change": 0.03}, {"nesterov": True},
    {"nesterov": True, "weight_decay": 0.02, "max_param_change": 0.05},
    {"layer_options": {"3": {"lr": 0.1, "momentum": 0.5}, "0": {"max_change": 0.01}}}]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_undo_gives_every_bit_back(settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = network(dtype, dropout=0.2)
    optimizer = ReversibleSGD(model, 0.3, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    states = []
    for step in range(40):
        states.append(vector(model).clone())
        optimizer.step(closure(model, optimizer, step))
        schedule.step()
    for step in reversed(range(40)):
        optimizer.undo(closure(model, optimizer, step))
        assert torch.equal(vector(model), states[step])
    assert optimizer.exact.spill_bytes == 0
    with pytest.raises(ReversalError, match="reversed"):
        optimizer.undo(closure(model, optimizer, 0))


def test_another_minibatch_is_reported_with_its_step() -> None:
    model = network()
    optimizer = ReversibleSGD(model, 0.3)
    for step in range(6):
        optimizer.step(closure(model, optimizer, step))
    optimizer.undo(closure(model, optimizer, 5))
    with pytest.raises(ReversalError, match=r"^step 5") as caught:
        optimizer.undo(closure(model, optimizer, 3))
    assert caught.value.step == 5


# --- weights that others change ---

def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def edited(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("3.weight")[0, 0] += 1.0


def averaged(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)  # torch counts no change of this


@pytest.mark.entry("A10", "you change the weights under a ReversibleSGD, as `model.load_state_dict` does", "error",
                   "weights set before the first step are adopted; later `step` raises ConfigError and `undo` ReversalError, "
                   "and both name the layer (changes through `p.data` are seen within as many steps as there are parameters)")
@pytest.mark.parametrize("change", [loaded, edited, averaged])
def test_weights_that_others_change_are_noticed(change: Callable[[nn.Module], None]) -> None:
    model = network()
    optimizer = ReversibleSGD(model, 0.3)
    for step in range(3):
        optimizer.step(closure(model, optimizer, step))
    change(model)
    changed = vector(model).clone()
    closure(model, optimizer, 3)()
    with pytest.raises(ConfigError, match=r"^[03] was changed"):
        optimizer.step()
    with pytest.raises(ReversalError, match=r"[03] was changed"):
        optimizer.undo(closure(model, optimizer, 2))
    assert torch.equal(vector(model), changed)


@pytest.mark.entry("A10")
@pytest.mark.parametrize("change", [loaded, edited, averaged])
def test_weights_set_before_the_first_step_are_adopted(change: Callable[[nn.Module], None]) -> None:
    early, late = network(), network()
    change(early)
    one, other = ReversibleSGD(early, 0.3), ReversibleSGD(late, 0.3)
    change(late)
    start = vector(late).clone()
    for step in range(5):
        one.step(closure(early, one, step))
        other.step(closure(late, other, step))
    assert torch.equal(vector(early), vector(late))
    for step in reversed(range(5)):
        other.undo(closure(late, other, step))
    assert torch.equal(vector(late), start)


def test_a_write_that_changes_nothing_is_no_change() -> None:
    model = network()
    optimizer = ReversibleSGD(model, 0.3)
    for step in range(4):
        optimizer.step(closure(model, optimizer, step))
        model.load_state_dict(model.state_dict())


@pytest.mark.entry("B6")
@pytest.mark.parametrize("way", ["saved", "deepcopy", "pickle"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_copies_and_saved_states_go_back_as_well(way: str, nesterov: bool) -> None:
    model = network()
    optimizer = ReversibleSGD(model, 0.3, nesterov=nesterov, max_param_change=0.05)
    start = vector(model).clone()
    for step in range(9):
        optimizer.step(closure(model, optimizer, step))
    if way == "saved":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        twin = network()
        other = ReversibleSGD(twin, 0.1, nesterov=nesterov)
        other.load_state_dict(torch.load(file))
    else:
        twin, other = copy.deepcopy((model, optimizer)) if way == "deepcopy" else pickle.loads(pickle.dumps((model, optimizer)))
    for step in reversed(range(9)):
        other.undo(closure(twin, other, step))
    assert torch.equal(vector(twin), start) and not torch.equal(vector(model), start)


@pytest.mark.entry("B3")
def test_param_groups_that_are_added_later_are_refused() -> None:
    model = network()
    model.get_submodule("0").requires_grad_(False)
    optimizer = ReversibleSGD(model, 0.3)
    with pytest.raises(ConfigError, match="new one"):
        optimizer.add_param_group({"params": model.get_submodule("0").parameters()})


def _stepped(model: nn.Module, x: torch.Tensor, num: int = 3, **options: Any) -> ReversibleSGD:
    optimizer = ReversibleSGD(model, 0.1, **options)
    for _ in range(num):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.entry("F16")
@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.01, "max_change": 0.1}])
def test_sparse_gradients_count_as_dense_ones(options: dict[str, Any]) -> None:
    models, ids = [words(sparse=True), words(sparse=False)], torch.arange(16) % 7
    before = models[0].table.weight.detach().clone()
    optimizers = [_stepped(model, ids, **options) for model in models]
    assert torch.equal(models[0].table.weight, models[1].table.weight) and not torch.equal(models[0].table.weight, before)

    def closure() -> None:
        optimizers[0].zero_grad()
        models[0](ids).square().mean().backward()
    for _ in range(3):
        optimizers[0].undo(closure)
    assert torch.equal(models[0].table.weight, before)


@pytest.mark.entry("F18")
def test_a_state_of_another_model_or_a_damaged_one_is_refused() -> None:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(5, 3)
    optimizer = _stepped(model, x, nesterov=True)
    state, weights = optimizer.state_dict(), model.weight.detach().clone()
    others: list[Any] = [None, [], "state", {}, {"model": {}, "optimizer": state},
                         torch.optim.SGD(model.parameters(), 0.1).state_dict()]
    others += [_stepped(other, x.to(next(other.parameters()).dtype), nesterov=True).state_dict()
               for other in (nn.Linear(5, 4), nn.Linear(5, 3, bias=False), nn.Linear(5, 3).double(),
                             nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))]
    values: list[Any] = [None, "text", {}, torch.ones(2)]
    for key in state:
        others.append({name: each for name, each in state.items() if name != key})
        # The state of each parameter is empty.
        others += [{**state, key: other} for other in values if key != "state" or other != {}]
    for key in state["exact"]:
        exact = {name: each for name, each in state["exact"].items() if name != key}
        wrong = [exact, *({**exact, key: other} for other in values)]
        others += [{**state, "exact": each} for each in wrong]
    for other in others:
        with pytest.raises(OptimizerStateError):
            optimizer.load_state_dict(other)
        assert torch.equal(model.weight, weights)
    digests = {**state, "exact": {**state["exact"], "x": state["exact"]["x"] + 1}}
    with pytest.raises(ReversalError):
        optimizer.load_state_dict(digests)
    assert torch.equal(model.weight, weights)
    optimizer.load_state_dict(state)
    assert optimizer.exact.num_steps == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes_are_refused_at_construction_and_later(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")   # of torch: complex modules
        with pytest.raises(ArgumentError):
            ReversibleSGD(nn.Linear(5, 3).to(dtype), 0.1)
    model = nn.Linear(5, 3)
    optimizer = _stepped(model, torch.ones(8, 5))
    model.double()
    with pytest.raises(ConfigError, match="dtype"):
        optimizer.step()
