"""Loops on two processes: DistributedDataParallel, FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from ngsgd import NGSGD, NaturalMuon
from ngsgd.errors import ConfigError
from ngsgd.optim import SGD
from tests.gloo import gloo_group
from tests.optim.loops.task import minibatches, network, train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")]


def on_two_ranks(task: Callable[[int], None], folder: Path) -> None:
    spawn(_rank, (task, folder), nprocs=2)


def _rank(rank: int, task: Callable[[int], None], folder: Path) -> None:
    torch.set_num_threads(1)
    with gloo_group(folder, rank, 2):
        task(rank)


def _with_ddp(rank: int) -> None:
    for wraps_first in (True, False):
        model: nn.Module = network()
        if wraps_first:
            model = nn.parallel.DistributedDataParallel(model)
            optimizer = NGSGD(model, lr=0.5)
        else:
            optimizer = NGSGD(model, lr=0.5)
            model = nn.parallel.DistributedDataParallel(model)
        losses = train(model, optimizer, minibatches()[rank::2] * 4)
        assert sum(losses[-4:]) < sum(losses[:4])
        assert {estimate.num_calls for _, estimate in optimizer.preconditioners()} == {16}
        _assert_equal_on_ranks(model)


@pytest.mark.entry("L4")
def test_replicas_stay_equal(tmp_path: Path) -> None:
    on_two_ranks(_with_ddp, tmp_path)


def _wrapped(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], order: str) -> tuple[nn.Module,
                                                                                                    torch.optim.Optimizer]:
    """(the model to call, the optimizer), for the three orders of wrapping."""
    if order == "optimizer first":
        optimizer = make(model)
        return nn.parallel.DistributedDataParallel(model), optimizer
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, make(wrapped if order == "of the wrapper" else model)


def _assert_equal_on_ranks(model: nn.Module) -> Tensor:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    assert torch.equal(both[0], both[1])
    return flat


REPLICAS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "NaturalMuon": lambda model: NaturalMuon(model, 0.01),
    "NGSGD(mean)": lambda model: NGSGD(model, 0.01, loss_reduction="mean"),
    "NGSGD(mean), sgd": lambda model: NGSGD(model, 0.01, loss_reduction="mean", fallback="sgd", weight_decay=1e-4),
    "NGSGD(max_change_per_sample)": lambda model: NGSGD(model, 0.5, max_change_per_sample=1e-3),
}
ORDERS = ("optimizer first", "wrapper first", "of the wrapper")


def _require_equal_replicas(rank: int, build: Callable[[], nn.Module],
                            makes: Iterable[Callable[[nn.Module], Any]]) -> None:
    """Train on different numbers of rows."""
    for make in makes:
        for order in ORDERS:
            model = build()
            start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            wrapped, optimizer = _wrapped(model, make, order)
            for x, y in minibatches(8)[rank::2]:
                num = 16 - 7 * rank
                train(wrapped, optimizer, [(x[:num], y[:num])])
            assert float((_assert_equal_on_ranks(model) - start).norm()) > 1e-3


def _with_unequal_ranks(rank: int) -> None:
    _require_equal_replicas(rank, network, REPLICAS.values())


@pytest.mark.entry("F10", "you train with NaturalMuon, or NGSGD with a mean loss, under DistributedDataParallel and ranks have "
                   "different numbers of rows", "works",
                   "replicas stay bitwise equal in all orders of wrapping. NGSGD multiplies by the mean number of samples of "
                   "a rank, as DDP's gradient is the mean over ranks. If one rank cannot find its number, all raise ConfigError")
def test_replicas_with_unequal_rows_stay_equal(tmp_path: Path) -> None:
    on_two_ranks(_with_unequal_ranks, tmp_path)


class _Head(nn.Linear):
    """A subclass, which has no natural gradient."""


def _without_natural_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_Head(10, 16), nn.Tanh(), _Head(16, 3))


def _plain(model: nn.Module, **options: Any) -> NGSGD:
    """An optimizer of a model of which no layer takes natural-gradient steps."""
    optimizer = NGSGD(model, 0.01, loss_reduction="mean", **options)
    assert not optimizer.preconditioned
    return optimizer


def _with_unequal_plain_ranks(rank: int) -> None:
    _require_equal_replicas(rank, _without_natural_layers, [partial(_plain, fallback="sgd")])
    _require_equal_replicas(rank, network, [partial(_plain, layer_options={"*": {"rule": "sgd"}})])


@pytest.mark.entry("F10")
def test_replicas_without_natural_layers_stay_equal(tmp_path: Path) -> None:
    on_two_ranks(_with_unequal_plain_ranks, tmp_path)


def _with_samples_of_ranks(rank: int) -> None:
    results = []
    for given in (None, 12):
        model = network()
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = NGSGD(model, 0.001, loss_reduction="mean")
        for x, y in minibatches(6)[rank::2]:
            num = 16 - 8 * rank
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x[:num]), y[:num]).backward()
            optimizer.step(num_samples=given)
        results.append(_assert_equal_on_ranks(model))
    assert torch.equal(*results)
    # one rank has a loss of two numbers of samples
    output = wrapped(x)
    loss = nn.functional.cross_entropy(output, y)
    (loss + nn.functional.cross_entropy(output[:4], y[:4]) if rank else loss).backward()
    with pytest.raises(ConfigError, match="num_samples"):
        optimizer.step()


@pytest.mark.entry("F10")
def test_the_number_of_samples_is_the_mean_of_the_ranks(tmp_path: Path) -> None:
    on_two_ranks(_with_samples_of_ranks, tmp_path)


def _with_fsdp2(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for kind in (NGSGD, SGD):
        model = network()
        fully_shard(model, mesh=mesh)
        with pytest.raises(ConfigError, match="FSDP2"):
            kind(model, 0.5)
        for part in ("all", "first"):
            model = network()
            optimizer = kind(model, 0.5)
            fully_shard(model if part == "all" else model[0], mesh=mesh)
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ConfigError, match="FSDP2"):
                train(model, optimizer, minibatches(2)[rank:rank + 1])
            for p, value in zip(model.parameters(), before, strict=True):
                ours, theirs = (getattr(each, "to_local", each.detach)() for each in (p, value))
                assert torch.equal(ours, theirs)


def _with_fsdp1(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    for kind in (NGSGD, SGD):
        for keeps in (False, True):
            with pytest.raises(ConfigError, match="FSDP"):
                kind(FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=keeps), 0.5)
            model = network()
            optimizer = kind(model, 0.5)
            wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=keeps)
            with pytest.raises(ConfigError, match="FSDP"):
                train(wrapped, optimizer, minibatches(2)[rank:rank + 1])


@pytest.mark.entry("L5", "you train with FSDP or FSDP2 (`fully_shard`)", "error",
                   "ConfigError at construction if the parameters are sharded already, else at the first step, before anything "
                   "moves; use DistributedDataParallel")
@pytest.mark.entry("A12", "you call `fully_shard` after making NGSGD or SGD", "error",
                   "ConfigError at the first step: the parameters of the optimizer are no longer the model's")
@pytest.mark.entry("B1", "you give a model under FSDP or FSDP2 to NGSGD or SGD", "error",
                   "ConfigError at construction names the layer")
@pytest.mark.parametrize("task", [_with_fsdp2, _with_fsdp1])
def test_sharded_parameters_are_refused(task: Callable[[int], None], tmp_path: Path) -> None:
    on_two_ranks(task, tmp_path)
