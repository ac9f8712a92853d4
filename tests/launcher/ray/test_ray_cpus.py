"""A Ray cluster on which no worker can start is rejected before data preparation."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import ray

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError
from ngsgd.launcher.doctor import cluster as doctor_cluster
from ngsgd.launcher.ray import cluster

CONFIG = ClusterConfig(kind="ray", address="10.0.0.1:6379", threads_per_worker=2, ranks_per_worker=2)


@pytest.fixture
def num_cpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """CPUs that the cluster's nodes offer, by node; and "left", set when the cluster is left."""
    found: dict[str, float] = {}

    def nodes() -> list[dict[str, object]]:
        return [{"Alive": name != "dead", "Resources": {"CPU": one} if one else {}} for name, one in found.items()]
    monkeypatch.setattr(ray, "is_initialized", lambda: False)   # other tests share one Ray session
    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(ray, "shutdown", lambda: found.update(left=1.0))
    monkeypatch.setattr(cluster, "connect", lambda _config: False)
    monkeypatch.setattr(cluster, "JOIN_TIMEOUT_S", 0.0)
    return found


@pytest.mark.parametrize("offered", [{"head": 0.0}, {"head": 0.0, "n1": 3.0}, {"dead": 8.0}])
def test_a_cluster_without_room_for_one_worker_is_an_error(num_cpus: dict[str, float], offered: dict[str, float]) -> None:
    num_cpus.update(offered)
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379"):
        cluster.require_workers(CONFIG)
    assert "left" in num_cpus


def test_a_cluster_with_room_for_one_worker_passes_and_is_left(num_cpus: dict[str, float]) -> None:
    num_cpus.update(head=0.0, n1=4.0)
    cluster.require_workers(CONFIG)
    assert "left" in num_cpus


def test_the_room_for_workers_is_that_of_whole_machines(num_cpus: dict[str, float]) -> None:
    num_cpus.update(head=0.0, n1=7.0, n2=5.0, dead=8.0)
    assert "room for 2" in cluster.room_for_workers(4)
    # a Ray of the run itself reserves no CPUs
    assert cluster.room_for_workers(0) == ""


def test_a_machine_that_joins_a_moment_later_is_waited_for(num_cpus: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    num_cpus.update(head=0.0)
    monkeypatch.setattr(cluster, "JOIN_TIMEOUT_S", 60.0)
    monkeypatch.setattr("time.sleep", lambda _s: num_cpus.update(n1=4.0))
    cluster.require_workers(CONFIG)


def test_a_session_of_the_program_itself_is_not_ended(num_cpus: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    num_cpus.update(n1=4.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    cluster.require_workers(CONFIG)
    assert "left" not in num_cpus


@pytest.mark.parametrize(("offered", "verdict"), [(0.0, "fail"), (4.0, "ok")])
def test_doctor_checks_the_cpus_of_the_cluster(offered: float, verdict: str, num_cpus: dict[str, float], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": offered})
    first = next(doctor_cluster.nodes("10.0.0.1:6379", tmp_path))
    assert (first.what, first.verdict) == ("Ray", verdict)


def test_joining_a_cluster_keeps_the_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray replaces it by one that ends the process with a crash dump."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(cluster, "require_head", lambda _address: None)
    try:
        cluster.connect(CONFIG)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
