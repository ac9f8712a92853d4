"""The exchange over NCCL, with gloo in NCCL's place: sums, members that die, generations."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ngsgd.cluster.exchange import collective_client
from ngsgd.cluster.exchange.authentication import new_secret
from ngsgd.cluster.exchange.collective import GroupFailure, StepRequest, StepShard
from ngsgd.cluster.exchange.collective_client import Exchange
from ngsgd.cluster.exchange.process_group import Group, join
from ngsgd.cluster.exchange.rendezvous import Rendezvous
from ngsgd.cluster.groups import GroupRanks, backend_of
from tests.cluster.exchange.stand_in import GlooAsNccl, nccl, worker_with_stand_in
from tests.cluster.exchange.test_collective import (
    DISTURBANCES,
    PLAIN,
    PoolThatDisturbs,
    Swarm,
    collective,
    require_one_death,
)
from tests.toy import Run

__all__ = ["nccl"]
CPU = torch.device("cpu")


class NcclSwarm(Swarm):
    def __init__(self, num_workers: int) -> None:
        super().__init__(PLAIN, num_workers)
        self.exchange = Exchange("127.0.0.1", 120.0, backend="nccl")


def test_generations_have_the_coordinators_mean_and_each_change_of_members_makes_another(nccl: type[GlooAsNccl]) -> None:
    swarm = NcclSwarm(3)
    assert all(swarm.round(workers, number) for number, workers in enumerate([(0, 1), (0, 1), (0, 1, 2), (1, 2)]))
    assert [{order.generation for order in orders.values()} for orders in swarm.orders] == [{1}, {1}, {2}, {3}]
    assert nccl.num_aborted == 4
    swarm.exchange.close()


def test_a_member_that_leaves_revokes_the_group_for_all(nccl: type[GlooAsNccl]) -> None:
    # the others would wait for a minute
    swarm = NcclSwarm(3)
    assert swarm.round((0, 1, 2), 0)
    whole = swarm.ask

    def ask(orders: Mapping[int, StepRequest], timeout_s: float, when_lost: Callable[[], None]) -> dict[int, object]:
        threading.Timer(0.2, swarm.members[2].leave).start()
        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(lambda worker: swarm.members[worker].step(orders[worker]), (0, 1)))
        assert all(isinstance(answer, GroupFailure) for answer in answers)
        return dict(enumerate(answers))
    swarm.ask = ask  # type: ignore[method-assign]
    assert not swarm.round((0, 1, 2), 1)
    swarm.ask = whole  # type: ignore[method-assign]
    assert swarm.round((0, 1, 2), 2)
    assert swarm.orders[-1][0].generation == 2
    assert len(swarm.exchange.news()) == 1
    swarm.exchange.close()


def test_an_order_of_an_earlier_generation_is_refused(nccl: type[GlooAsNccl]) -> None:
    swarm = NcclSwarm(3)
    assert swarm.round((0, 1), 0) and swarm.round((0, 1, 2), 1)
    stale = replace(swarm.orders[0][0], timeout_s=5.0)
    answer = swarm.members[0].step(stale)
    assert isinstance(answer, GroupFailure) and answer.generation == 1
    # the member has left its group. An average that begins before the coordinator has noticed fails
    swarm.round((0, 1, 2), 2)
    assert swarm.round((0, 1, 2), 3)
    assert swarm.orders[-1][0].generation == 3
    swarm.exchange.close()


def test_a_late_answer_of_an_earlier_generation_is_not_used(nccl: type[GlooAsNccl]) -> None:
    swarm = NcclSwarm(2)
    whole = swarm.ask

    def ask(orders: Mapping[int, StepRequest], timeout_s: float, when_lost: Callable[[], None]) -> dict[int, object]:
        answers = whole(orders, timeout_s, when_lost)
        late = answers[1]
        assert isinstance(late, StepShard)
        return {**answers, 1: replace(late, generation=late.generation - 1)}
    swarm.ask = ask  # type: ignore[method-assign]
    assert not swarm.round((0, 1), 0)
    swarm.exchange.close()


def test_a_library_that_moves_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's fake process group does, it reports success and sends nothing."""
    class Fake(GlooAsNccl):
        def __init__(self, store: object, rank: int, size: int, options: object) -> None:
            pass

        def alltoall_base(self, received: torch.Tensor, *arguments: object) -> object:  # type: ignore[override]
            received.zero_()
            return Done()

        def abort(self) -> None:
            pass

    class Done:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            pass
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Fake, raising=False)
    swarm = NcclSwarm(2)
    assert not swarm.round((0, 1), 0)
    assert len(swarm.exchange.news()) == 1
    swarm.exchange.close()


def test_a_torch_without_nccl_is_a_failure_of_the_group() -> None:
    if hasattr(torch.distributed, "ProcessGroupNCCL"):
        pytest.skip("this torch has NCCL")
    swarm = NcclSwarm(2)
    assert not swarm.round((0, 1), 0)
    swarm.exchange.close()


# ---------------------------------------------------------------------------------- sums of ranks
def joined(rendezvous: Rendezvous, num_ranks: int) -> list[Group]:
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(lambda rank: join("nccl", rendezvous.host, rendezvous.port, secret=rendezvous.secret, generation=0,
                                                  rank=rank, world_size=num_ranks, timeout_s=60.0, device=CPU), range(num_ranks)))


def test_gradients_of_ranks_are_summed_and_a_dead_rank_is_an_error(nccl: type[GlooAsNccl]) -> None:
    rendezvous = Rendezvous("127.0.0.1", new_secret(), revokes=True)
    groups = joined(rendezvous, 3)
    models = [torch.nn.Linear(4, 2) for _ in groups]
    gradients = [torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for model, gradient in zip(models, gradients, strict=True):
        model.weight.grad = gradient.clone()
    ranks = [GroupRanks(rank, 3, group, CPU) for rank, group in enumerate(groups)]
    with ThreadPoolExecutor(3) as threads:
        counts = list(threads.map(lambda rank: ranks[rank].sum_gradients(models[rank], 10 + rank), range(3)))
    assert counts == [33, 33, 33]
    for model in models:
        assert model.weight.grad is not None
        # sums of three float32 in any order
        torch.testing.assert_close(model.weight.grad, sum(gradients), rtol=1e-6, atol=1e-6)
    ranks[1].close()
    for one in (0, 2):
        with pytest.raises(RuntimeError):
            ranks[one].any(False)
    assert rendezvous.is_closed
    for one in (0, 2):
        ranks[one].close()


def test_a_group_leaves_no_setting_behind(nccl: type[GlooAsNccl]) -> None:
    rendezvous = Rendezvous("127.0.0.1", new_secret(), revokes=True)
    (group,) = joined(rendezvous, 1)
    # no thread of torch's that ends the process, and no call that blocks forever
    assert nccl.made == [("1", 0)]
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    group.close()
    rendezvous.close()


def test_a_group_whose_deadline_passes_is_an_error(nccl: type[GlooAsNccl]) -> None:
    rendezvous = Rendezvous("127.0.0.1", new_secret(), revokes=True)
    groups = joined(rendezvous, 2)
    with pytest.raises(RuntimeError):
        # the other rank never calls
        groups[0].all_reduce(torch.ones(1), deadline=0.0)
    # gloo's own operation ends when the other rank is gone
    for group in reversed(groups):
        group.close()
    rendezvous.close()


@pytest.mark.parametrize(("kind", "num_visible", "backend"), [
    ("cpu", 0, "gloo"), ("cuda", 4, "nccl"), ("cuda", 8, "nccl"), ("cuda", 2, "gloo"), ("cuda", 1, "gloo")])
def test_ranks_that_share_a_gpu_use_gloo(monkeypatch: pytest.MonkeyPatch, kind: str, num_visible: int, backend: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    assert backend_of(torch.device(kind), 4) == backend


# --------------------------------------------------------------------------------------- processes
class NcclPool(PoolThatDisturbs):
    def __init__(self, run: Run, number: signal.Signals, which: int) -> None:
        super().__init__(run, number, which)
        self.make_worker = worker_with_stand_in
        self._exchange = Exchange("127.0.0.1", backend="nccl", codec=run.config.cluster.codec)


@pytest.mark.faults
@DISTURBANCES
def test_a_worker_that_dies_or_hangs_costs_its_job_and_the_next_generation_works(
        tmp_path: Path, number: signal.Signals, which: int, timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_client, "EXCHANGE_TIMEOUT_S", timeout_s)
    run = Run(tmp_path, collective(3))
    require_one_death(run, NcclPool(run, number, which))
