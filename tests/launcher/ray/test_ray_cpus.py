"""Room for workers on a Ray cluster, which may have none now; their GPUs."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError
from ngsgd.launcher.doctor import cluster as doctor_cluster
from ngsgd.launcher.ray import capacity, cluster
from ngsgd.launcher.ray.capacity import gpu_share, gpus_per_worker, room_for
from tests.tiers import HANGS_S

CONFIG = ClusterConfig(kind="ray", address="10.0.0.1:6379", threads_per_worker=2, ranks_per_worker=2, wait_for_workers_s=1e-3)


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Ray reports about its machines."""
    found = SimpleNamespace(active_nodes=[], pending_launches=[], pending_nodes=[], failed_launches=[])
    monkeypatch.setattr("ray.autoscaler.v2.sdk.get_cluster_status", lambda _address: found)
    return found


@pytest.fixture
def num_cpus(monkeypatch: pytest.MonkeyPatch, status: SimpleNamespace) -> dict[str, float]:
    """CPUs of each node; "left" is set when the cluster is left, "asked" has the requested CPUs."""
    found: dict[str, float] = {}

    def nodes() -> list[dict[str, object]]:
        return [{"NodeID": name, "Alive": name != "dead", "Resources": {"CPU": one} if one else {}}
                for name, one in found.items() if name not in ("left", "asked")]

    def remote(num_cpus: float, **_options: object) -> object:
        found["asked"] = num_cpus
        return lambda _function: SimpleNamespace(remote=lambda: "demand")
    # other tests share one Ray session
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "cancel", lambda *_arguments, **_options: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
    monkeypatch.setattr(ray, "shutdown", lambda: found.update(left=1.0))
    monkeypatch.setattr(cluster, "connect", lambda _config: False)
    return found


@pytest.mark.parametrize("offered", [{"head": 0.0}, {"head": 0.0, "n1": 3.0}, {"dead": 8.0}])
def test_room_for_one_worker_is_asked_for_and_waited_for(num_cpus: dict[str, float], offered: dict[str, float]) -> None:
    num_cpus.update(offered)
    lines: list[str] = []
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379"):
        cluster.require_workers(CONFIG, lines.append)
    assert num_cpus["asked"] == 4.0 and "left" in num_cpus
    assert any("0 of 2 workers" in line and "4 CPUs" in line for line in lines)


def test_a_cluster_with_room_for_one_worker_passes_and_is_left(num_cpus: dict[str, float]) -> None:
    num_cpus.update(head=0.0, n1=4.0)
    cluster.require_workers(CONFIG, pytest.fail)
    assert "left" in num_cpus and "asked" not in num_cpus


def test_the_room_for_workers_is_that_of_whole_machines(num_cpus: dict[str, float]) -> None:
    num_cpus.update(head=0.0, n1=7.0, n2=5.0, dead=8.0)
    assert room_for({"CPU": 4.0}) == 2
    # a share never spans two GPUs
    assert room_for({"CPU": 0.3}) == 3 * 12


@pytest.mark.entry("El1", "the Ray cluster of `cluster.address` has no machine for a worker: its autoscaler is at zero", "works",
                   "room for one worker is asked for before the data are prepared, and for all when training starts; a line every "
                   "10 s has the missing machines and those that start")
def test_a_machine_that_is_started_is_waited_for(num_cpus: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    num_cpus.update(head=0.0)
    monkeypatch.setattr("time.sleep", lambda _s: num_cpus.update(n1=4.0))
    cluster.require_workers(replace(CONFIG, wait_for_workers_s=HANGS_S), lambda _line: None)
    assert num_cpus["asked"] == 4.0


def test_a_session_of_the_program_itself_is_not_ended(num_cpus: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    num_cpus.update(n1=4.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    cluster.require_workers(CONFIG, pytest.fail)
    assert "left" not in num_cpus


def test_machines_that_start_are_shown_with_their_time_and_are_news(num_cpus: dict[str, float], status: SimpleNamespace) -> None:
    num_cpus.update(n1=4.0)
    status.pending_launches = [SimpleNamespace(ray_node_type_name="big", count=3, request_ts_s=time.time() - 70.0)]
    status.failed_launches = [SimpleNamespace(ray_node_type_name="spot", count=1, details="no capacity")]
    states = {"n1": "DRAINING", "n2": "RUNNING"}
    status.active_nodes = [SimpleNamespace(node_id=name, node_status=state) for name, state in states.items()]
    lines: list[str] = []
    watched = capacity.Capacity("10.0.0.1:6379", {"CPU": 4.0}, 2, lines.append)
    deadline = time.monotonic() + HANGS_S
    while not watched.draining and time.monotonic() < deadline:
        pass
    assert watched.draining == {"n1"}
    assert not watched.has_news(), "the first look"
    assert not watched.has_news(), "nothing changed"
    num_cpus.update(n2=1.0)
    assert watched.has_news()
    assert "3 x big" in lines[-1] and "no capacity" in lines[-1] and "1 of 2" in lines[-1]
    num_cpus.update(n3=4.0)
    assert watched.has_news() and len(lines) == 3, "there is room for all"
    watched.close()


@pytest.mark.entry("El2", "`cluster.address` with GPUs of which only some, or none, are up", "works",
                   "each worker asks for one GPU per rank, or `cluster.gpus_per_worker`, whatever is up now. A line reports that "
                   "workers use CPUs. A GPU that torch cannot use is an error")
@pytest.mark.parametrize(("num_gpus", "settings", "is_own", "expected"), [
    (8.0, {"num_workers": 32}, False, 1.0), (0.0, {"device": "cuda", "num_workers": 4}, False, 1.0),
    (2.0, {"ranks_per_worker": 4}, False, 4.0), (0.0, {"gpus_per_worker": 0.25}, False, 0.25), (0.0, {}, False, 0.0),
    (8.0, {"device": "cpu"}, False, 0.0), (1.0, {"num_workers": 2}, True, 0.5), (0.0, {}, True, 0.0),
    (4.0, {"num_workers": 2, "ranks_per_worker": 2}, True, 2.0)])
def test_gpus_are_counted_from_what_was_asked(num_gpus: float, settings: dict[str, Any], is_own: bool, expected: float,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": num_gpus})
    lines: list[str] = []
    assert gpus_per_worker(ClusterConfig(**settings), is_own=is_own, report=lines.append) == expected
    assert bool(lines) == (not is_own and not expected and settings.get("device") != "cpu")


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"num_workers": 2, "ranks_per_worker": 2}])
def test_a_machine_without_the_gpus_is_an_error(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {} if "device" in settings else {"GPU": 3.0})
    with pytest.raises(ClusterError, match="GPU"):
        gpus_per_worker(ClusterConfig(**settings), is_own=True)


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


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("num_workers", [1, 2, 7, 8, 16, 48, 100])
def test_all_workers_find_room_and_no_gpu_has_more_than_its_part(num_gpus: int, num_workers: int) -> None:
    """As Ray counts: in ten-thousandths, and a share never spans two GPUs."""
    units = round(1e4 * gpu_share(num_gpus, num_workers))
    room_on_one = 10_000 // units
    assert num_gpus * room_on_one >= num_workers, "somebody would wait for ever"
    assert room_on_one == -(-num_workers // num_gpus), "more than the even part would fit onto one"


def test_without_gpus_none_is_asked_for() -> None:
    assert gpu_share(0.0, 4) == 0.0
