"""LocalSGD when models change, differ or are not finite, and states that continue."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.optim import lr_scheduler

import ngsgd
from ngsgd.errors import ClusterError, ConfigError, DivergenceError
from ngsgd.optim.outer import DiLoCo
from tests.cluster.ranks import made, results, run_ranks

OUTERS = ("average", "bmuf", "diloco")


@torch.no_grad()
def seeded(model: nn.Module, seed: int) -> Any:
    """The model with random parameters; threads share the generator of torch."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, dtype=torch.float64, generator=random))
    return model


def net() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), 1)  # type: ignore[no-any-return]


@torch.no_grad()
def moved(module: nn.Module, rank: int) -> None:
    """A step that differs between ranks."""
    for p in module.parameters():
        if p.requires_grad:
            p.add_(rank + 1.0)


def weights(model: nn.Module) -> list[float]:
    """The mean of each parameter."""
    return [float(p.detach().double().mean()) for p in model.parameters()]


def assert_equal_errors(found: list[Any], kind: type[Exception], *names: str) -> None:
    """Every rank raises this error, which names the layer or option."""
    for one in found:
        assert type(one) is kind, one
        assert all(name in str(one) for name in names)


@pytest.mark.entry("F3", "you freeze or unfreeze a layer between two averages of `LocalSGD`", "works",
                   "A frozen layer is averaged once more and keeps the value. An unfrozen layer is averaged; its first average is "
                   "the mean of the ranks, and the outer rule starts with the next one.")
@pytest.mark.parametrize("outer", OUTERS)
def test_layers_are_frozen_and_unfrozen(outer: str) -> None:
    def rank_of(rank: int) -> list[list[float]]:
        model: Any = net()
        model[0].requires_grad_(False)
        local, found = made(model, outer=outer), [weights(model)]

        def average() -> None:
            moved(model, rank)
            local.step()
            found.append(weights(model))
        average()
        model[0].requires_grad_(True)
        average()
        average()
        # after a step of the round
        moved(model[1], rank)
        model[1].requires_grad_(False)
        average()
        average()
        local.finish()
        return [*found, weights(model)]
    first, second = results(2, rank_of)
    assert first == second
    start, frozen, unfrozen, both, late, later, end = first
    # the mean of the changes of two ranks, also of the layer that the rule sees for the first time
    assert frozen[0] == start[0] and unfrozen[0] == pytest.approx(start[0] + 1.5, abs=1e-6)
    # a frozen layer stays, whatever the momentum of the rule
    assert late[2:] != both[2:] and late[2:] == later[2:] == end[2:]
    if outer == "average":
        assert later[0] == pytest.approx(start[0] + 4 * 1.5, abs=1e-5)
        assert later[2] == pytest.approx(start[2] + 4 * 1.5, abs=1e-5)


@pytest.mark.entry("F3")
def test_a_rule_sees_an_unfrozen_layer_from_its_second_average() -> None:
    def rank_of(rank: int) -> float:
        model: Any = net()
        model[0].requires_grad_(False)
        local = made(model, outer=DiLoCo(1.0, 0.5))
        model[0].requires_grad_(True)
        for _ in range(3):
            moved(model, rank)
            local.step()
        return weights(model)[0]
    # the mean, then G (1 + mu) and G (1 + mu + mu^2): Nesterov momentum from the second average on
    wanted = pytest.approx(weights(net())[0] + 1.5 + 1.5 * 1.5 + 1.5 * 1.75, abs=1e-5)
    assert results(2, rank_of) == [wanted, wanted]


def replaced(model: Any) -> None:
    model[1] = nn.Linear(3, 2)


def wider(model: Any) -> None:
    model[1].weight.data = torch.randn(4, 3)


def sharded(model: Any) -> None:
    mesh: Any = DeviceMesh("cpu", list(range(dist.get_world_size())))
    distribute_module(model, mesh)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "1.weight": replaced, "[4, 3]": wider, "extra": lambda model: model.register_parameter("extra", nn.Parameter(torch.ones(2))),
    "DTensor": sharded, "meta": lambda model: model[1].to("meta"),
    "sparse": lambda model: model.register_buffer("graph", torch.eye(3).to_sparse())}


@pytest.mark.entry("F3")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_has_no_average_is_one_error_on_every_rank(name: str) -> None:
    def rank_of(rank: int) -> None:
        model: Any = net()
        local = made(model)
        local.step()
        CHANGES[name](model)
        local.step()
    assert_equal_errors(run_ranks(2, rank_of), ConfigError, name)


@pytest.mark.entry("F3")
@pytest.mark.parametrize("name", [*CHANGES, "frozen", "float64", "shape"])
@pytest.mark.parametrize("first", [True, False])
def test_models_that_differ_between_ranks_are_one_error_on_every_rank(name: str, first: bool) -> None:
    changes: dict[str, Callable[[Any], Any]] = {
        **CHANGES, "frozen": lambda model: model[1].weight.requires_grad_(False), "float64": lambda model: model.double(),
        "shape": lambda model: model.register_buffer("shape", torch.ones(3))}

    def rank_of(rank: int) -> None:
        model: Any = net()
        if not first:
            local = made(model)
            local.step()
        if rank == 1 and name != "DTensor":
            changes[name](model)
        if name == "DTensor":
            # a collective of all ranks
            sharded(model)
        if first:
            local = made(model)
        local.step()
    shown = {"frozen": "1.weight", "1.weight": "", "[4, 3]": "", "meta": "meta"}
    if first and name == "1.weight":
        # only its values differ, which the constructor makes equal
        assert run_ranks(2, rank_of) == [None, None]
        return
    assert_equal_errors(run_ranks(2, rank_of), ConfigError, shown.get(name, name))


@pytest.mark.entry("F3")
@pytest.mark.parametrize("outer", OUTERS)
def test_a_model_moves_to_another_dtype(outer: str) -> None:
    def rank_of(rank: int) -> tuple[list[float], torch.dtype]:
        model: Any = net()
        local = made(model, outer=outer)
        for convert in (nn.Module.double, nn.Module.bfloat16, nn.Module.float):
            moved(model, rank)
            local.step()
            convert(model)
            if outer == "average" and convert is nn.Module.double:
                before = weights(model)[0]
                model[0].weight.data.add_(1e-9 * (rank + 1))
                local.step()
                # float32 has no such digits
                assert weights(model)[0] == pytest.approx(before + 1.5e-9, rel=0, abs=1e-14)
        moved(model, rank)
        local.step()
        return weights(model), model[0].weight.dtype
    (first, dtype), (second, _) = results(2, rank_of)
    assert first == second and dtype is torch.float32
    if outer == "average":
        # bfloat16 has 8 bits
        assert first[0] == pytest.approx(weights(net())[0] + 4 * 1.5, rel=1e-2)


def lazy() -> Any:
    return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))


def inference() -> Any:
    model: Any = net()
    with torch.inference_mode():
        model.register_buffer("inference", torch.ones(3))
    return model


def fsdp() -> Any:
    model: Any = net()
    return fully_shard(model, mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))


@pytest.mark.entry("D2", "you give a model with FSDP2 or other DTensor parameters to `LocalSGD`", "error",
                   "`ConfigError`, on every rank, at the start or at the next average. Use DistributedDataParallel inside of a "
                   "replica.")
@pytest.mark.parametrize(("model_fn", "name"), [
    (fsdp, "FSDP2"), (lazy, "0.weight"), (inference, "inference"), (lambda: net().to("meta"), "meta"),
    (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")), "1.weight")])
def test_tensors_that_ranks_cannot_exchange_are_refused(model_fn: Callable[[], nn.Module], name: str) -> None:
    assert_equal_errors(run_ranks(2, lambda rank: made(model_fn())), ConfigError, name)


@pytest.mark.entry("F7", "the parameters of a rank of `LocalSGD` are not finite", "works",
                   "The rank is excluded, named in a warning, and continues with the average of the others. If no rank is finite, "
                   "every rank raises `DivergenceError`.")
@pytest.mark.parametrize("where", ["parameter", "complex", "statistic", "frozen"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("outer", OUTERS)
def test_a_rank_that_is_not_finite_is_excluded(where: str, value: float, outer: str) -> None:
    if where == "frozen" and value == float("inf"):
        # an infinity is legitimate there, as in masks
        return

    def rank_of(rank: int) -> Any:
        model: Any = nn.Sequential(net()[0], nn.BatchNorm1d(3))
        model.phase, model.teacher = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(2), False)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        local = ngsgd.LocalSGD(model, optimizer, sync_every=1, outer=outer)
        moved(model, rank)
        if rank == 1:
            tensor = {"parameter": model[0].weight, "complex": model.phase, "statistic": model[1].running_var,
                      "frozen": model.teacher}[where]
            tensor.data[0] = complex(0, value) if where == "complex" else value
            optimizer.state[model[0].weight]["exp_avg"] = torch.full((3, 3), value)
        local.step(rank + 1)
        assert bool(optimizer.state[model[0].weight].get("exp_avg", torch.ones(1)).isfinite().all())
        # parameters of the module itself come first
        return [tensor.detach().clone() for tensor in (model[0].weight, *model.parameters(), *model.buffers())], local.num_rounds
    start = weights(net())[0]
    with pytest.warns(UserWarning, match=r"rank 1 ") as caught:
        found = results(3, rank_of)
    assert len(caught) == 3
    for tensors, num_rounds in found:
        assert num_rounds == 1
        assert all(torch.equal(one, other) and bool(one.isfinite().all())
                   for one, other in zip(tensors, found[0][0], strict=True))
    if outer == "average":
        assert float(found[0][0][0].double().mean()) == pytest.approx(start + (1 * 1 + 3 * 3) / 4, abs=1e-6)


@pytest.mark.entry("F7")
def test_no_finite_rank_is_an_error_on_every_rank() -> None:
    def rank_of(rank: int) -> None:
        model: Any = net()
        local = made(model)
        with torch.no_grad():
            model[0].weight.fill_(torch.nan)
        # the finite values of a rank without samples do not count
        local.step(0 if rank == 2 else 3)
    assert_equal_errors(run_ranks(3, rank_of), DivergenceError, "0.weight")


@pytest.mark.entry("F7")
def test_values_of_a_rank_without_samples_never_count() -> None:
    def rank_of(rank: int) -> list[float]:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        local = made(model)
        moved(model, rank)
        if rank == 1:
            for tensor in (*model.parameters(), model[1].running_mean, model[1].running_var):
                tensor.data.fill_(torch.nan)
        local.step(0 if rank == 1 else 5)
        return [float(tensor.detach().sum()) for tensor in (*model.parameters(), *model.buffers())]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first, second = results(2, rank_of)
    assert first == second and first[-3:] == [0.0, 3.0, 0.0]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.7, total_steps=12),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6)}


@pytest.mark.entry("F4", "you use `LocalSGD(reset_optimizer=True)` with a learning-rate schedule", "works",
                   "Only the state starts again (momentum, moments, Fisher estimates). Learning rates, momentum and other settings "
                   "of the groups stay.")
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "NGSGD", "NaturalMuon"])
@pytest.mark.parametrize("schedule", ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULERS)])
def test_a_schedule_is_that_without_reset(schedule: str, kind: str) -> None:
    def rates(*, reset: bool) -> tuple[list[list[Any]], int]:
        model: Any = net()
        optimizer: torch.optim.Optimizer
        if kind == "SGD":
            optimizer = torch.optim.SGD(model.parameters(), 0.9, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 0.9) if kind == "AdamW" else getattr(ngsgd, kind)(model, 0.9)
        local = ngsgd.LocalSGD(model, optimizer, sync_every=3, reset_optimizer=reset)
        for group in optimizer.param_groups:
            # the recipe of docs/local-sgd.md
            group["lr"] *= local.num_ranks / local.gain / 2
        names = SCHEDULERS if schedule == "all" else [schedule]
        schedulers, found, num_states = [SCHEDULERS[name](optimizer) for name in names], [], 0
        for _ in range(12):
            optimizer.zero_grad()
            (1e-3 * model(torch.randn(4, 3)).square().mean()).backward()
            optimizer.step()
            num_states += local.step(4) and not any(isinstance(value, Tensor) and bool(value.any()) for values
                                                    in optimizer.state.values() for value in values.values())
            for one in schedulers:
                one.step()
            found.append([value for group in optimizer.param_groups for value in (
                group["lr"], group["initial_lr"], group.get("momentum", group.get("betas")))])
        return found, num_states
    (plain, _), (found, num_reset) = results(1, lambda rank: rates(reset=False))[0], results(1, lambda rank: rates(reset=True))[0]
    assert found == plain and len({one[0] for one in found}) > 3
    assert num_reset == 4


@pytest.mark.entry("F4")
def test_a_reset_keeps_settings_and_restores_the_state_by_parameter() -> None:
    def rank_of(rank: int) -> None:
        model: Any = net()
        optimizer = torch.optim.Adagrad([model[0].weight], 0.1, initial_accumulator_value=0.5)
        local = ngsgd.LocalSGD(model, optimizer, sync_every=1, reset_optimizer=True)
        rate = torch.tensor(0.25)
        optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": [model[1].weight]})
        optimizer.state[model[1].weight] = {"step": torch.tensor(0.0), "sum": torch.full((2, 3), 7.0)}
        optimizer.param_groups[1].update(lr=rate, note="mine")
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        assert not torch.equal(optimizer.state[model[0].weight]["sum"], torch.full((3, 3), 0.5))
        local.step()
        assert torch.equal(optimizer.state[model[0].weight]["sum"], torch.full((3, 3), 0.5))
        assert optimizer.param_groups[1]["lr"] is rate and optimizer.param_groups[1]["note"] == "mine"
    results(1, rank_of)


@pytest.mark.parametrize("outer", OUTERS)
def test_a_state_of_a_mixed_model_continues_bitwise(outer: str) -> None:
    def trained(rank: int, steps: range, state: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.float64))
        model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        model.table = nn.Parameter(torch.empty(5, dtype=torch.float64), requires_grad=False)
        local = made(seeded(model, rank), outer=outer, sync_every=3)
        if state is not None:
            model.load_state_dict(state["model"])
            local.load_state_dict(state["local"])
        for step in steps:
            random = torch.Generator().manual_seed(10 * step + rank)
            with torch.no_grad():
                model[1](torch.randn(8, 3, generator=random))
                for p in (p for p in model.parameters() if p.requires_grad):
                    p.add_(torch.randn(p.shape, generator=random).to(p.dtype))
            local.step(rank + 1)
        return copy.deepcopy(model.state_dict()), {"model": copy.deepcopy(model.state_dict()), "local": local.state_dict()}

    def rank_of(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        whole, _ = trained(rank, range(10))
        early, state = trained(rank, range(4))
        return whole, trained(rank, range(4, 10), state)[0], early
    for whole, resumed, early in results(2, rank_of):
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        assert not torch.equal(whole["0.weight"], early["0.weight"])


def foreign_states(model: nn.Module, local: ngsgd.LocalSGD) -> dict[str, Any]:
    state = local.state_dict()
    wide = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    renamed = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 2))
    return {"wider": made(wide, outer="diloco").state_dict(), "other names": made(renamed, outer="diloco").state_dict(),
            "dtype": made(net().double(), outer="diloco").state_dict(), "half": made(net().half(), outer="diloco").state_dict(),
            "rule": made(net(), outer="bmuf").state_dict(), "plain": made(net()).state_dict(),
            "model": model.state_dict(), "checkpoint": {"local": state}, "none": None, "empty": {},
            **{f"without {key}": {name: value for name, value in state.items() if name != key} for key in state},
            **{f"{key} is {value!r}": {**state, key: value} for key in state for value in (None, "3", [1.5], {"a": "b"})
               if not (key == "numbers" and value == {})},
            "short": {**state, "start": {name: tensor[1:] for name, tensor in state["start"].items()}},
            "rounded": {**state, "arrays": {name: {key: tensor.half() for key, tensor in arrays.items()}
                                            for name, arrays in state["arrays"].items()}}}


def test_states_of_others_are_refused_before_anything_changes() -> None:
    def rank_of(rank: int) -> None:
        model: Any = net()
        local = made(model, outer="diloco")
        moved(model, rank)
        local.step()
        before = local.state_dict()
        for name, state in foreign_states(model, local).items():
            with pytest.raises(ConfigError):
                local.load_state_dict(state)
            after = local.state_dict()
            assert {key: after[key] for key in after if key not in ("arrays", "start")} == {
                key: before[key] for key in before if key not in ("arrays", "start")}, name
            assert all(torch.equal(after["arrays"]["float32"][key], value) for key, value in before["arrays"]["float32"].items())
        local.load_state_dict(before)
    results(1, rank_of)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, ValueError])
def test_an_error_of_this_process_is_no_dead_rank(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_of(rank: int) -> int:
        model: Any = net()
        local = made(model)
        local.step()

        def fails(*arguments: Any, **settings: Any) -> Any:
            raise error("of this process")
        with monkeypatch.context() as patch:
            patch.setattr(torch, "mul", fails)
            with pytest.raises(error):
                local.step()
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_reduce", fails)
            # an exchange that fails with all ranks alive ends, too
            with pytest.raises(ClusterError if error is RuntimeError else error):
                local.step()
        return local.num_rounds
    assert results(1, rank_of) == [1]
