"""Two ranks over gloo, each with its part of the minibatch, against one process with all of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import EKFAC, KFAC, SENG, SOAP, DiagonalNG, LayerWiseNG, Preconditioner, Shampoo, UnitWiseNG
from ngsgd.preconditioners.replicas import ProcessGroupComm
from tests.preconditioners.problems import close, move
from tests.wired import Wired

c10d: Any = torch.distributed
F = nn.functional
# kept until the process ends: a group that is freed while its thread still frees the tensors of its
# last exchange waits for that thread, which waits for the interpreter's lock
_GROUPS: list[Any] = []
PARTS = (slice(0, 4), slice(4, 10))   # ranks need not have equally many rows


def _net() -> nn.Sequential:
    """From a separate generator: the ranks are threads, and share torch's."""
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2.0)
    return model


def _minibatch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(10, 5, generator=generator, dtype=torch.float64), torch.randint(4, (10,), generator=generator)


def _on_two_ranks(work: Callable[[Any], Any]) -> list[Any]:
    """What `work(group)` returns on each; the groups are real, in threads of this process."""
    store = c10d.HashStore()

    def on_rank(rank: int) -> Any:
        group = c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        _GROUPS.append(group)
        return work(group)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(on_rank, range(2)))


def _trained(method: type[Preconditioner], options: dict[str, Any], group: Any = None) -> tuple[list[Tensor], list[str]]:
    """(parameters, the weights whose inverses this process made)."""
    model = _net()
    preconditioner = method(model, damping=0.1, curvature_interval=2, inverse_interval=2, **options)
    made: list[str] = []
    inverted = preconditioner.inverted
    preconditioner.inverted = lambda name, known: made.append(name) or inverted(name, known)  # type: ignore[method-assign, func-returns-value]
    if group is not None:
        preconditioner.split_work(group)
    for step in range(3):
        x, y = _minibatch(step)
        rows = slice(None) if group is None else PARTS[group.rank()]
        model.zero_grad()
        preconditioner.evaluate(lambda x=x[rows], y=y[rows]: F.cross_entropy(model(x), y))  # type: ignore[misc]
        if group is not None:   # as a data-parallel loop does, by rows
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= len(y[rows]) / len(y)
                group.allreduce([p.grad]).wait()
        preconditioner.step()
        move(model, 0.05)
    return [p.detach() for p in model.parameters()], made


@pytest.mark.parametrize(("method", "options"), [
    (KFAC, {}), (KFAC, {"ema_decay": 0.0, "graft": "gradient"}), (KFAC, {"fisher": "exact"}),
    (DiagonalNG, {}), (UnitWiseNG, {}), (LayerWiseNG, {}),
    (Shampoo, {}), (SOAP, {})])
def test_two_ranks_take_the_steps_of_one_process(method: type[Preconditioner], options: dict[str, Any]) -> None:
    wanted, alone = _trained(method, options)
    ranks = _on_two_ranks(lambda group: _trained(method, options, group))
    for found, _ in ranks:
        for one, other in zip(wanted, found, strict=True):
            close(other, one)
    (first, mine), (second, others) = ranks
    # inverses are sent, not made twice
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert mine and others and not {*mine} & {*others} and {*mine, *others} == {*alone}


def test_layers_go_to_the_rank_with_the_least_to_do() -> None:
    costs = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 1.0}
    (owners, _) = _on_two_ranks(lambda group: ProcessGroupComm(group,
                                                               torch.device("cpu")).owners(costs))
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_states_of_all_types_arrive_bitwise_identical() -> None:
    state = {"weight": {"U": torch.randn(3, 5).T, "weight": torch.tensor(0.25, dtype=torch.float64), "half": torch.randn(3).half()}}
    mine = {"é": {"n": torch.tensor([7])}}

    def work(group: Any) -> Any:
        return ProcessGroupComm(group,
                                torch.device("cpu")).exchanged(state if group.rank() == 0 else mine, {})
    for found in _on_two_ranks(work):
        assert found.keys() == {"weight", "é"}
        for name, values in {**state, **mine}.items():
            for key, value in values.items():
                assert found[name][key].dtype == value.dtype and torch.equal(found[name][key], value)


def test_mistakes_are_reported() -> None:
    for method in (EKFAC, SENG):
        with pytest.raises(ConfigError, match="split"):
            method(_net()).split_work(None)


def _refusals(work: Callable[[Any], Any]) -> list[ConfigError]:
    """The error of each rank; both must have one, and none may wait for the other."""
    def refused(group: Any) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            work(group)
        return caught.value
    return _on_two_ranks(refused)


def test_ranks_with_curvature_of_different_sizes_are_refused() -> None:
    for error in _refusals(lambda group: ProcessGroupComm(group, torch.device("cpu")).mean(
            {"a": {"A": torch.ones(2 + group.rank())}}, 1.0)):
        assert "a" in str(error)


def _experts() -> nn.Module:
    """Two experts of one size; a rank uses one of them."""
    return Wired(lambda m, x, number: m.output(m.experts[number](x).tanh()),
                 experts=nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)]), output=nn.Linear(4, 4))


@pytest.mark.parametrize("method", [KFAC, DiagonalNG, UnitWiseNG, LayerWiseNG])
def test_different_experts_of_equal_size_are_not_averaged(method: type[Preconditioner]) -> None:
    def work(group: Any, differs: bool) -> list[float]:
        model = _experts()
        preconditioner = method(model, damping=0.1)
        preconditioner.split_work(group)
        x, y = torch.randn(6, 5), torch.arange(6) % 4
        preconditioner.evaluate(lambda: F.cross_entropy(model(x, group.rank() if differs else 0), y))
        preconditioner.step()
        return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    for rank, error in enumerate(_refusals(lambda group: work(group, True))):
        assert f"experts.{rank}.weight" in str(error)
    assert all(norm > 0.0 for norms in _on_two_ranks(lambda group: work(group, False)) for norm in norms)


def test_ranks_that_invert_different_layers_are_refused() -> None:
    def work(group: Any) -> None:
        model = _experts()
        preconditioner = Shampoo(model)
        preconditioner.split_work(group)
        F.cross_entropy(model(torch.randn(6, 5), group.rank()), torch.arange(6) % 4).backward()
        preconditioner.step()
    for rank, error in enumerate(_refusals(work)):
        assert f"experts.{rank}.weight" in str(error)
