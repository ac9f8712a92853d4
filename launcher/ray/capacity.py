"""The capacity of a Ray cluster: room for workers, and machines that start or are drained."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ray

from ngsgd.config import ClusterConfig
from ngsgd.counting import counted
from ngsgd.errors import ClusterError
from ngsgd.training.worker_wait import AwakeClock, WorkerWait

POLL_S = 2.0
# a poll takes at most this fraction of the time of a processor, also with a thousand machines
_COST = 0.01
_ROOM_POLL_S = 0.2


class Capacity:
    """The machines of a cluster with room for `num_workers` workers that `need` resources each.

    A thread reads them, because a head that does not answer would block; without an address the
    cluster is one machine, and stays it.
    """

    def __init__(self, address: str, need: Mapping[str, float], num_workers: int, report: Callable[[str], object]) -> None:
        # ids of nodes that take no more work, and end soon
        self.draining: frozenset[str] = frozenset()
        self._need, self._num_workers, self._report = need, num_workers, report
        # machines that are requested or start -> time since which they are
        self._pending: dict[str, float] = {}
        self._failed: tuple[str, ...] = ()
        self._seen: object = None
        self._ended = threading.Event()
        if address:
            threading.Thread(target=self._watch, args=(address,), name="ray-capacity", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def has_news(self) -> bool:
        """Report missing room; return whether machines came or were requested since then."""
        alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        before, self._seen = self._seen, (alive, sorted(self._pending))
        if self._need and (found := room_for(self._need)) < self._num_workers:
            starting = [f"{name} starts (for {time.time() - since:.0f} s)" for name, since in self._pending.items()]
            self._report(f"the machines of the cluster have room for {found} of {counted(self._num_workers, 'worker')}, each of "
                         f"which takes {in_words(self._need)}; "
                         f"{'; '.join(('more machines are asked for', *starting, *self._failed))}")
        return before is not None and before != self._seen

    def _watch(self, address: str) -> None:
        # not at the top: it imports the code of the autoscaler
        from ray.autoscaler.v2.sdk import get_cluster_status
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            # waiting for the head takes no processor
            began = time.thread_time()
            # the head may start again; `HeadWatch` reports that it is lost
            with contextlib.suppress(Exception):
                self._read(get_cluster_status(address))
            wait_s = max(POLL_S, (time.thread_time() - began) / _COST)

    def _read(self, status: Any) -> None:
        self.draining = frozenset(node.node_id for node in status.active_nodes if node.node_status == "DRAINING")
        kinds = Counter(node.ray_node_type_name for node in status.pending_nodes)
        kinds.update({one.ray_node_type_name: one.count for one in status.pending_launches})
        since = {one.ray_node_type_name: float(one.request_ts_s) for one in status.pending_launches}
        self._pending = {name: self._pending.get(name, since.get(kind, time.time()))
                         for kind, count in kinds.items() for name in (f"{count} x {kind}",)}
        self._failed = tuple(f"{one.count} x {one.ray_node_type_name} could not be started ({one.details})"
                             for one in status.failed_launches)


def room_for(need: Mapping[str, float]) -> int:
    """Return for how many workers the machines of the cluster have room, whoever uses them now."""
    def fitting(total: float, share: float) -> int:
        # a share never spans two GPUs
        return int(total) * int(1.0 // share) if share < 1.0 else int(total // share)
    return sum(min(fitting(node["Resources"].get(name, 0.0), share) for name, share in need.items())
               for node in ray.nodes() if node["Alive"])


def in_words(need: Mapping[str, float]) -> str:
    return " and ".join(f"{share:g} {name}" + ("s" if share != 1.0 else "") for name, share in need.items())


def need_of(num_cpus: int, num_gpus: float) -> dict[str, float]:
    """Return the resources of one worker, by Ray's names."""
    return {name: share for name, share in (("CPU", float(num_cpus)), ("GPU", num_gpus)) if share}


def require_room(need: Mapping[str, float], config: ClusterConfig, head: str, report: Callable[[str], object]) -> None:
    """Wait until a machine has room for one worker, and let an autoscaler start one.

    Raises:
        ClusterError: none came within `cluster.wait_for_workers_s` after the last sign of life.
    """
    if room_for(need):
        return
    capacity, clock = Capacity(head, need, config.num_workers, report), AwakeClock()
    wait = WorkerWait(config.wait_for_workers_s, report)
    # what an autoscaler reacts to
    demand = ray.remote(num_cpus=need.get("CPU", 0.0), num_gpus=need.get("GPU", 0.0), max_retries=0)(_nothing).remote()
    try:
        while not room_for(need):
            if wait.is_over(clock.now, 0, 1, config.num_workers, capacity.has_news):
                raise ClusterError(f"no machine of the Ray cluster at {config.address} has the {in_words(need)} of a worker, and "
                                   f"none joined within cluster.wait_for_workers_s = {config.wait_for_workers_s:g}. Run on each "
                                   "machine that trains: ray start --address=HEAD:PORT, without --num-cpus=0. Or set "
                                   "cluster.threads_per_worker or cluster.gpus_per_worker to fewer.")
            time.sleep(_ROOM_POLL_S)
            clock.tick()
    finally:
        capacity.close()
        ray.cancel(demand, force=True)


def _nothing() -> None:
    """Do nothing, where there is room for a worker."""


def gpus_per_worker(config: ClusterConfig, *, is_own: bool, report: Callable[[str], object] = lambda _line: None) -> float:
    """Return the GPUs that each worker asks Ray for.

    The machine of the program's own Ray (`is_own`) is divided. A cluster may grow, so that each
    rank of a worker asks for one GPU there, however many are up now.
    """
    size, num_gpus = config.ranks_per_worker, float(ray.cluster_resources().get("GPU", 0.0))
    if config.device == "cpu" or config.gpus_per_worker:
        return config.gpus_per_worker
    if not num_gpus and config.device == "cuda" and is_own:
        raise ClusterError("cluster.device is cuda, but Ray sees no GPU; set cluster.device=auto or cpu.")
    if not num_gpus and config.device == "auto":
        if not is_own:
            report("no machine of the cluster has a GPU now, so that workers use CPUs; to ask for GPUs, set cluster.device=cuda")
        return 0.0
    if is_own and size == 1:
        return gpu_share(num_gpus, config.num_workers)
    if is_own and num_gpus < size * config.num_workers:
        raise ClusterError(f"{config.num_workers} workers of {size} ranks need a GPU for each rank, and Ray has {num_gpus:g}; ask "
                           "for fewer with cluster.num_workers or cluster.ranks_per_worker.")
    return float(size)


def gpu_share(num_gpus: float, num_workers: int) -> float:
    """GPUs of a worker: one if there are enough, else the largest equal share for all workers."""
    workers_per_gpu = math.ceil(num_workers / num_gpus) if num_gpus else 0
    # Ray counts in ten-thousandths: six workers of 0.1667 would not fit
    return math.floor(1e4 / workers_per_gpu) / 1e4 if workers_per_gpu else 0.0
