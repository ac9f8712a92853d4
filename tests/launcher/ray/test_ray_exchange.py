"""Which way results take to the average on a Ray cluster: never one that was not measured, unless it is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from ngsgd.cluster.fingerprint import Fingerprint
from ngsgd.config import ClusterConfig, OuterConfig, check
from ngsgd.errors import ClusterError, DataError
from ngsgd.launcher.ray.cluster import exchange_error
from ngsgd.launcher.ray.pool import RayPool, WorkerSlot
from ngsgd.launcher.ray.worker import Address
from tests.toy import Run, config


def pool_of(tmp_path: Path, exchange: Any, *, far: bool, gpus: float = 0.0, size: int = 50_000_000) -> RayPool:
    run = Run(tmp_path)
    spec = replace(run.spec, config=replace(run.config, cluster=ClusterConfig(exchange=exchange)))
    pool = RayPool(spec, 1, size)
    addresses = [Address(f"host{index}", 1 + index, Fingerprint(), index == 0 or not far) for index in range(2)]
    pool._slots = [WorkerSlot(index, None, None, address) for index, address in enumerate(addresses)]
    pool.gpus_per_worker = lambda: gpus  # type: ignore[method-assign]
    return pool


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("gpus", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [1000, 50_000_000])
def test_auto_never_averages_among_the_workers(tmp_path: Path, far: bool, gpus: float, size: int) -> None:
    """That is the slowest way on one machine, was never measured between machines, and NCCL was never run."""
    assert pool_of(tmp_path, "auto", far=far, gpus=gpus, size=size).chosen_exchange() == "shared_memory"


def test_the_others_are_taken_when_they_are_named(tmp_path: Path) -> None:
    assert pool_of(tmp_path / "a", "collective", far=True, gpus=1.0).chosen_exchange() == "collective"
    assert pool_of(tmp_path / "b", "nccl", far=True, gpus=1.0).chosen_exchange() == "nccl"
    assert pool_of(tmp_path / "c", "object_store", far=True).chosen_exchange() == "object_store"


@pytest.mark.parametrize("gpus", [0.0, 0.5])
def test_nccl_needs_a_whole_gpu_for_each_worker(tmp_path: Path, gpus: float) -> None:
    with pytest.raises(ClusterError, match="nccl"):
        pool_of(tmp_path, "nccl", far=True, gpus=gpus).chosen_exchange()


@pytest.mark.parametrize("changes", [
    {"cluster": ClusterConfig("local", exchange="nccl")},
    {"cluster": ClusterConfig("ray", exchange="nccl"), "outer": OuterConfig("streaming")}])
def test_nccl_where_it_cannot_be_is_named(changes: dict[str, object]) -> None:
    (problem,) = check(config(**changes))
    assert "nccl" in problem


def test_a_worker_that_fails_while_it_averages_is_not_said_to_run_other_code() -> None:
    def failed(cause: Exception) -> RayTaskError:
        return RayTaskError("answer", "traceback", cause)
    error = exchange_error(failed(ValueError("vector::_M_default_append")))
    assert isinstance(error, ClusterError)
    assert "vector::_M_default_append" in str(error) and "version" not in str(error)
    assert isinstance(exchange_error(failed(DataError("archive 3"))), DataError)
