"""Collectives with tensors of the device: groups of ngsgd and torch.distributed, NCCL with one rank
and gloo with two.

NCCL allows one rank per GPU, so on one GPU it runs with a world size of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from benchmarks.gpu.measurement import Failed, Measurement
from ngsgd import LocalSGD
from ngsgd.cluster.exchange.process_group import Backend, join
from ngsgd.cluster.exchange.rendezvous import Rendezvous

_TIMEOUT_S = 30.0


def run(measurement: Measurement) -> None:
    size = 1000 if measurement.dry_run else 10_000_000
    with measurement.case("group of ngsgd, NCCL, world of one") as figures:
        measurement.need_gpu("NCCL")
        figures.update(_nccl_group(measurement, size))
    with measurement.case("torch.distributed, NCCL, world of one, LocalSGD"):
        measurement.need_gpu("NCCL")
        with TemporaryDirectory() as folder:
            _init("nccl", folder, 0, 1)
            _local_sgd(measurement.device)
            distributed.destroy_process_group()
    with measurement.case(
        "torch.distributed, gloo, two processes, tensors of the device, LocalSGD"
    ) as figures:
        figures.update(_two_processes(measurement.dry_run, size))
    with measurement.case("group of ngsgd, gloo, world of one") as figures:
        figures.update(_gloo_group(size))


def _nccl_group(measurement: Measurement, size: int) -> dict[str, float]:
    """All-reduce on the device, and all-to-all from and to host memory, as in parameter averaging.
    """
    with _group_of_one("nccl", torch.device("cuda", 0)) as group:
        tensor = torch.arange(size, dtype=torch.float32, device=measurement.device)
        reduced = tensor.clone()
        group.all_reduce(reduced, time.monotonic() + _TIMEOUT_S)
        _require(torch.equal(reduced, tensor), "all-reduce of one rank changed the tensor")
        return _all_to_all(group, size)


def _gloo_group(size: int) -> dict[str, float]:
    with _group_of_one("gloo", torch.device("cpu")) as group:
        return _all_to_all(group, size)


@contextlib.contextmanager
def _group_of_one(backend: Backend, device: torch.device) -> Iterator[Any]:
    """A group of ngsgd with one member."""
    secret = secrets.token_bytes(32)
    rendezvous = Rendezvous("127.0.0.1", secret)
    group = join(
        backend,
        "127.0.0.1",
        rendezvous.port,
        secret=secret,
        generation=0,
        rank=0,
        world_size=1,
        timeout_s=_TIMEOUT_S,
        device=device,
    )
    try:
        yield group
    finally:
        group.close()
        rendezvous.close()


def _all_to_all(group: Any, size: int) -> dict[str, float]:
    sent = np.arange(size, dtype=np.uint8)
    start = time.perf_counter()
    received = group.all_to_all(sent, [size], [size], time.monotonic() + _TIMEOUT_S)
    seconds = time.perf_counter() - start
    _require(bool(np.array_equal(received, sent)), "all-to-all of one rank changed the bytes")
    return {"all_to_all_gb_per_s": round(2 * size / seconds / 1e9, 3)}


def _two_processes(dry_run: bool, size: int) -> dict[str, float]:
    """Two ranks that share the device; CUDA requires spawned processes."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(
                target=_gloo_rank, args=(rank, folder, dry_run, size, pipes[rank][1]), daemon=True
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            found = [
                _received(pipe, process) for (pipe, _), process in zip(pipes, ranks, strict=True)
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()
    _require(
        found[0]["digest"] == found[1]["digest"],
        "the parameters of the two ranks differ after averaging",
    )
    return {"all_reduce_gb_per_s": round(found[0]["gb_per_s"], 3)}


def _received(pipe: Connection, process: Any) -> Any:
    if not pipe.poll(_TIMEOUT_S):
        raise Failed(
            f"a rank sent nothing within {_TIMEOUT_S:.0f} s (exit code {process.exitcode})"
        )
    found = pipe.recv()
    _require("error" not in found, str(found.get("error")))
    return found


def _gloo_rank(rank: int, folder: str, dry_run: bool, size: int, pipe: Connection) -> None:
    try:
        device = torch.device("cpu" if dry_run else "cuda")
        _init("gloo", folder, rank, 2)
        tensor = torch.full((size,), float(rank + 1), device=device)
        distributed.all_reduce(tensor)
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        seconds = time.perf_counter() - start
        _require(
            float(tensor[0]) == 6.0 and float(tensor[-1]) == 6.0,
            f"the sum is {float(tensor[0])} instead of 6",
        )
        pipe.send({"digest": _local_sgd(device), "gb_per_s": 4 * size / seconds / 1e9})
        distributed.destroy_process_group()
    except Exception as error:
        pipe.send({"error": f"rank {rank}: {type(error).__name__}: {error}"})


def _init(backend: str, folder: str, rank: int, world_size: int) -> None:
    distributed.init_process_group(
        backend,
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )


def _local_sgd(device: torch.device) -> float:
    """The sum of the parameters after four steps with two averagings; each rank has different
    minibatches.
    """
    torch.manual_seed(0)
    model = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local = LocalSGD(model, optimizer, sync_every=2, outer="average")
    torch.manual_seed(1 + distributed.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(torch.randn(8, 16, device=device)), torch.arange(8, device=device) % 4
        ).backward()
        optimizer.step()
        local.step()
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Failed(message)
