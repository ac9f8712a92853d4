"""Gloo instead of NCCL: `ngsgd` then runs the code that it has for NCCL, on CPUs.

It keeps the two properties of NCCL over NVLink that gloo does not have: without `asyncOp` an
operation returns nothing, and one whose peer is gone never ends.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from ngsgd.cluster.groups import make_worker
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Worker

c10d: Any = torch.distributed


class _Work:
    """An operation that is never done when it failed."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            return False
        return True

    def wait(self) -> None:
        self._work.wait()


class GlooAsNccl:
    """A `torch.distributed.ProcessGroupNCCL` on CPUs."""

    class Options:
        def __init__(self) -> None:
            self._timeout: Any = None
            self.config = SimpleNamespace(blocking=1)

    # (environment variable for blocking waits, config.blocking) of each that was made
    made: list[tuple[str | None, int]] = []  # noqa: RUF012
    num_aborted = 0

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.made.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), options.config.blocking))
        own = c10d.ProcessGroupGloo._Options()
        own._timeout = options._timeout
        own._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = c10d.ProcessGroupGloo(store, rank, size, own)

    def alltoall_base(self, *arguments: Any) -> _Work | None:
        work = self._group.alltoall_base(*arguments)
        return _Work(work) if arguments[-1].asyncOp else None

    def allreduce(self, tensors: Any, settings: Any) -> _Work | None:
        work = self._group.allreduce(tensors, settings)
        return _Work(work) if settings.asyncOp else None

    def abort(self) -> None:
        type(self).num_aborted += 1
        self._group.abort()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[GlooAsNccl]:
    """The class that this process takes for NCCL's."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", GlooAsNccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60")
    monkeypatch.setattr(GlooAsNccl, "made", [])
    monkeypatch.setattr(GlooAsNccl, "num_aborted", 0)
    return GlooAsNccl


def worker_with_stand_in(spec: TaskSpec, index: int) -> Worker:
    """A worker whose process takes gloo for NCCL."""
    c10d.ProcessGroupNCCL = GlooAsNccl
    return make_worker(spec, index)
