"""Ranks of torch.distributed as threads of this process: cheap, and a hang ends by a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg

import ngsgd
from ngsgd.errors import NgsgdError
from tests.tiers import HANGS_S


def run_ranks(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Run `function(rank)` on each rank; return results, or the errors that it raised."""
    found: list[Any] = [None] * num_ranks
    c10d: Any = torch._C._distributed_c10d
    store = c10d.HashStore()
    c10d._set_thread_isolation_mode(True)
    multi_threaded_pg.ProcessLocalGroup.reset()
    multi_threaded_pg._install_threaded_pg()

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            found[rank] = function(rank)
        except BaseException as error:
            found[rank] = error
            if not isinstance(error, NgsgdError):
                # the other ranks must not wait for this one
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(num_ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_S)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)
    return found


def results(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Like `run_ranks`, but an error of a rank is raised."""
    found = run_ranks(num_ranks, function)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def made(model: nn.Module, **options: Any) -> ngsgd.LocalSGD:
    """LocalSGD that averages after each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return ngsgd.LocalSGD(model, optimizer, **{"sync_every": 1, "outer": "average", **options})
