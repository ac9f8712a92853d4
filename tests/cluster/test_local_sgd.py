"""Local SGD over torch.distributed: the engine's trajectory, and ranks that die."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh

import ngsgd
from ngsgd.errors import ConfigError
from ngsgd.optim.outer import Average, Bmuf, DiLoCo, OuterInfo, OuterOptimizer
from tests.gloo import gloo_group
from tests.tiers import HANGS_S

NUM_RANKS, NUM_STEPS, EVERY, DIM = 4, 12, 3, 5
RULES: dict[str, Callable[[], Any]] = {"average": Average, "bmuf": Bmuf, "diloco": DiLoCo}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 2))


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank r has r + 2 samples a step."""
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(rank + 2, DIM, generator=random), torch.randn(rank + 2, 2, generator=random)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> int:
    x_ND, y_NK = samples(rank, step)
    optimizer.zero_grad()
    (model(x_ND) - y_NK).square().mean().backward()
    optimizer.step()
    return len(x_ND)


def expected(outer: str) -> torch.Tensor:
    """The same rounds one rank after another, with the engine's outer optimizer in float64."""
    model = make_model()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    optimizer = OuterOptimizer(RULES[outer](), start)
    for number in range(NUM_STEPS // EVERY):
        vectors, weights = [], []
        begin = torch.from_numpy(optimizer.broadcast())
        for rank in range(NUM_RANKS):
            nn.utils.vector_to_parameters(begin.clone(), model.parameters())
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            weights.append(float(sum(train_step(model, sgd, rank, number * EVERY + step) for step in range(EVERY))))
            vectors.append(nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy())
        optimizer.step(vectors, weights, OuterInfo(number, 10**9, NUM_RANKS, 0.0))
    return torch.from_numpy(np.array(optimizer.eval_model()))


def _init(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)


def _train(rank: int, folder: str, outers: tuple[str, ...], dies_at: int) -> None:
    _init(rank, folder)
    found = {outer: _trained(rank, outer, dies_at) for outer in outers}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    os._exit(0)


def _trained(rank: int, outer: str, dies_at: int) -> tuple[torch.Tensor, int]:
    """The final parameters, and how many ranks were left."""
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            # ranks that begin apart get the model of the first
            p.add_(0.1 * rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local = ngsgd.LocalSGD(model, optimizer, sync_every=EVERY, outer=outer,
                           timeout_s=8.0 if dies_at >= 0 else HANGS_S)
    for step in range(NUM_STEPS):
        if rank == 2 and step == dies_at:
            os._exit(9)
        local.step(num_samples=train_step(model, optimizer, rank, step))
    local.finish()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), local.num_ranks


def _run(folder: Path, *outers: str, dies_at: int = -1) -> list[dict[str, tuple[torch.Tensor, int]]]:
    return _spawn(_train, folder, outers, dies_at)


def _spawn(function: Callable[..., None], folder: Path, *arguments: Any) -> list[dict[str, tuple[torch.Tensor, int]]]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=function, args=(rank, str(folder), *arguments)) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS_S)
    return [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]


@pytest.mark.slow
def test_ranks_follow_the_engines_outer_optimizer(tmp_path: Path) -> None:
    found = _run(tmp_path, *RULES)
    assert len(found) == NUM_RANKS
    for outer in RULES:
        vectors = [one[outer][0] for one in found]
        assert all(torch.equal(vector, vectors[0]) for vector in vectors)
        # float32 sums here, float64 there, over four rounds
        torch.testing.assert_close(vectors[0], expected(outer), rtol=1e-5, atol=1e-6)


@pytest.mark.faults
def test_ranks_continue_without_one_that_dies(tmp_path: Path) -> None:
    found = _run(tmp_path, "bmuf", dies_at=7)
    assert [one["bmuf"][1] for one in found] == [3, 3, 3]
    vectors = [one["bmuf"][0] for one in found]
    assert all(torch.equal(vector, vectors[0]) for vector in vectors) and bool(vectors[0].isfinite().all())


def _train_with_a_lost_answer(rank: int, folder: str) -> None:
    """On rank 1 the second average fails after the others have it, as when a rank dies."""
    _init(rank, folder)
    all_reduce, num_calls = dist.all_reduce, 0

    def lossy(*arguments: Any, **settings: Any) -> Any:
        nonlocal num_calls
        found = all_reduce(*arguments, **settings)
        num_calls += 1
        if rank == 1 and num_calls == 2:
            raise RuntimeError("connection closed by peer")
        return found
    dist.all_reduce = lossy
    found = {"diloco": _trained(rank, "diloco", -1)}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    os._exit(0)


@pytest.mark.faults
def test_a_rank_that_misses_an_average_takes_the_state_of_the_others(tmp_path: Path) -> None:
    found = _spawn(_train_with_a_lost_answer, tmp_path)
    assert [one["diloco"][1] for one in found] == [NUM_RANKS] * NUM_RANKS
    # W, which only ranks with one outer momentum have in common
    assert all(torch.equal(one["diloco"][0], found[0]["diloco"][0]) for one in found)


def _train_in_a_mesh(rank: int, folder: str, dies_at: int) -> None:
    """Two replicas of two ranks; ranks of a column are averaged."""
    _init(rank, folder)
    if rank == 0:
        # processes with different numbers of groups
        dist.new_group([0], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    found = {}
    for name, group in (("mesh", mesh["replica"].get_group()), ("pairs", pairs[rank // 2]), ("again", mesh["replica"].get_group())):
        model = nn.Linear(2, 2)
        local = ngsgd.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), sync_every=1, outer="average", process_group=group,
                               timeout_s=8.0 if dies_at >= 0 else HANGS_S)
        for step in range(3):
            if rank == 3 and name == "again" and step == dies_at:
                os._exit(9)
            with torch.no_grad():
                model.weight.fill_(rank + 10 * step)
            local.step()
        found[name] = (model.weight[0, 0].detach(), local.num_ranks)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    # the store is in a file, so no rank waits for another
    os._exit(0)


@pytest.mark.entry("D1", "you give `LocalSGD` one of several process groups, as of a device mesh", "works",
                   "Ranks of a group are averaged with each other only. Names in the rendezvous store contain the ranks. A rank "
                   "that dies does not disturb other groups.")
@pytest.mark.slow
def test_groups_of_a_device_mesh_are_averaged_separately(tmp_path: Path) -> None:
    found = _spawn(_train_in_a_mesh, tmp_path, -1)
    # after step 2: 20 + the mean of the ranks 0 and 2, or 1 and 3
    assert [float(one[name][0]) for name in ("mesh", "again") for one in found] == [21.0, 22.0, 21.0, 22.0] * 2
    assert [float(one["pairs"][0]) for one in found] == [20.5, 20.5, 22.5, 22.5]


@pytest.mark.entry("D1")
@pytest.mark.faults
def test_a_dead_rank_does_not_disturb_another_group(tmp_path: Path) -> None:
    found = _spawn(_train_in_a_mesh, tmp_path, 1)
    assert [one["again"][1] for one in found] == [2, 1, 2]
    assert [float(one["again"][0]) for one in found] == [21.0, 21.0, 21.0]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with gloo_group(tmp_path):
        yield


def test_no_thread_is_left_after_the_end(one_rank: None) -> None:
    before = set(threading.enumerate())
    model = make_model()
    local = ngsgd.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), sync_every=2)
    assert set(threading.enumerate()) > before
    local.finish()
    assert set(threading.enumerate()) <= before


def test_wrong_arguments_are_refused(one_rank: None) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options in ({"sync_every": 0}, {"sync_every": 5, "outer": "median"}, {"sync_every": "8"}, {"sync_every": 2.5},
                    {"sync_every": 5, "outer": 3}, {"sync_every": 5, "outer": DiLoCo}, {"sync_every": 5, "timeout_s": "60"}):
        with pytest.raises(ConfigError):
            ngsgd.LocalSGD(model, optimizer, **options)
    with pytest.raises(ConfigError):
        ngsgd.LocalSGD(model.parameters(), optimizer, sync_every=5)  # type: ignore[arg-type]
    for other in (torch.optim.SGD(make_model().parameters(), 0.1), model.parameters()):
        with pytest.raises(ConfigError):
            ngsgd.LocalSGD(model, other, sync_every=5)  # type: ignore[arg-type]


def test_it_needs_torch_distributed() -> None:
    model = make_model()
    with pytest.raises(ConfigError):
        ngsgd.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), sync_every=2)
