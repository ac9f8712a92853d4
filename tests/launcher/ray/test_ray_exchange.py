"""Which way results take to the average on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from ngsgd.cluster.exchange.selection import WorkerDevice
from ngsgd.cluster.fingerprint import Fingerprint
from ngsgd.cluster.worker_process import Ready
from ngsgd.config import ClusterConfig, OuterConfig, check
from ngsgd.errors import ClusterError, DataError
from ngsgd.launcher.ray import pool as pool_module
from ngsgd.launcher.ray.cluster import exchange_error
from ngsgd.launcher.ray.pool import RayPool, WorkerSlot
from tests.toy import Run, config


def pool_of(tmp_path: Path, exchange: Any, devices: Sequence[WorkerDevice], lines: list[str]) -> RayPool:
    run = Run(tmp_path)
    spec = replace(run.spec, config=replace(run.config, cluster=ClusterConfig(exchange=exchange)))
    pool = RayPool(spec, 1, 1000, report=lines.append)
    pool._slots = [WorkerSlot(index=index, actor=None, fingerprint=Fingerprint(),
                              address=Ready(1 + index, Fingerprint(), device))
                   for index, device in enumerate(devices)]
    return pool


def test_the_pool_reports_the_choice_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    lines: list[str] = []
    near, far = WorkerDevice("here", True), WorkerDevice("there", False)
    gpus = [WorkerDevice("here", False, "0000:3b:00"), WorkerDevice("there", False, "0000:3b:00")]
    for number, (exchange, devices, num_lines) in enumerate([
            ("auto", [near, near], 0), ("auto", [near, far], 1), ("auto", [far], 1), ("auto", gpus, 1), ("nccl", gpus, 1)]):
        pool = pool_of(tmp_path / str(number), exchange, devices, lines)
        pool.choose_exchange()
        pool.choose_exchange()
        assert len(lines) == num_lines
        lines.clear()


@pytest.mark.parametrize(("num_gpus", "is_refused"), [(0.0, True), (1.0, True), (2.0, False), (8.0, False)])
def test_nccl_without_a_gpu_for_each_worker_is_refused_before_a_worker_starts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: float, is_refused: bool) -> None:
    class Started(Exception):
        pass

    def start(address: str) -> None:
        raise Started
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": num_gpus})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    monkeypatch.setattr(pool_module, "connect", lambda config: True)
    monkeypatch.setattr(pool_module, "HeadWatch", start)
    with pytest.raises(ClusterError if is_refused else Started):
        pool_of(tmp_path, "nccl", [], []).start()


@pytest.mark.parametrize("changes", [
    {"cluster": ClusterConfig("local", exchange="nccl")},
    {"cluster": ClusterConfig("ray", exchange="nccl"), "outer": OuterConfig("streaming")}])
def test_nccl_where_it_cannot_be_is_named(changes: dict[str, object]) -> None:
    (problem,) = check(config(**changes))
    assert "nccl" in problem


def test_a_worker_that_fails_while_averaging_is_not_reported_as_other_code() -> None:
    def failed(cause: Exception) -> RayTaskError:
        return RayTaskError("answer", "traceback", cause)
    error = exchange_error(failed(ValueError("vector::_M_default_append")))
    assert isinstance(error, ClusterError)
    assert "vector::_M_default_append" in str(error) and "version" not in str(error)
    assert isinstance(exchange_error(failed(DataError("archive 3"))), DataError)
