"""Checks of `ngsgd doctor --address` on each node of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngsgd.counting import counted
from ngsgd.errors import ClusterError, reason_of
from ngsgd.launcher.doctor import machine
from ngsgd.launcher.doctor.machine import Finding

_ANSWER_S = 60.0


@dataclass(frozen=True)
class NodeReport:
    """Whether a node reads and writes the files of this machine, its fingerprint, its problems."""

    sees: bool
    writes: bool
    code: str
    troubles: tuple[Finding, ...]


def nodes(address: str, output_dir: Path) -> Iterator[Finding]:
    """Join the cluster, run the checks on every node, and yield the findings."""
    from ngsgd.config import ClusterConfig
    from ngsgd.launcher.ray.cluster import connect
    try:
        connect(ClusterConfig("ray", address=address))
    except ClusterError as error:
        yield Finding("fail", "Ray", str(error), "if no head runs, start it with: ray start --head; the "
                                                 "token must be the same on every machine")
        return
    import ray
    alive = [node for node in ray.nodes() if node["Alive"]]
    resources = ray.cluster_resources()
    found = f"{address} answers, {counted(len(alive), 'node')}, {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    if not resources.get("CPU"):
        yield Finding("fail", "Ray", f"{found}: no worker can start",
                      f"on each machine that trains: ray start --address={address}, without --num-cpus=0")
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        yield Finding("warn", "Ray", found, "no token is used; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on every machine")
    else:
        yield Finding("ok", "Ray", found)
    mark = output_dir.absolute() / f".doctor-{os.getpid()}"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text("here")
        for node in alive:
            yield from _node(node, mark)
    except OSError as error:
        yield Finding("fail", "node", f"no node was checked: {mark.parent} cannot be written "
                      f"({error.strerror or error})",
                      "--output-dir=DIR on a file system that all machines share")
    finally:
        # where its folder is a file, there is nothing to remove
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)
        ray.shutdown()


def _node(node: Mapping[str, Any], mark: Path) -> Iterator[Finding]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    where = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    place = NodeAffinitySchedulingStrategy(node_id=str(node["NodeID"]), soft=False)
    num_cpus = int(node["Resources"].get("CPU", 0))
    task = ray.remote(num_cpus=0, scheduling_strategy=place, max_retries=0)
    try:
        found: NodeReport = ray.get(task(report_node).remote(str(mark), num_cpus), timeout=_ANSWER_S)
        # a second task, because the first one waits for the start of its process
        sent = time.time()
        now: float = ray.get(task(clock_time).remote(), timeout=_ANSWER_S)
    except Exception as error:
        reason = reason_of(error, 120)
        yield Finding("fail", "node", f"{where} runs no task ({reason})", "install ngsgd there, in the Python that runs Ray")
        return
    yield from judged(where, found, mark.parent, skew_s=skew(sent, now, time.time()))


def clock_time() -> float:
    return time.time()


def skew(sent: float, now: float, received: float) -> float:
    """Return the smallest offset of a clock that read `now` between two times of this machine."""
    return min(max(0.0, now - received), now - sent)


def report_node(mark: str, num_cpus: int) -> NodeReport:
    """Check the node that runs this task; it offers `num_cpus` CPUs to Ray."""
    from ngsgd.cluster.fingerprint import version_digest
    probe, writes = Path(f"{mark}-{time.time_ns()}"), True
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        writes = False
    found = [*machine.shadows(), *machine.memory(), *machine.gpus(), *machine.compiled(),
             *machine.storage(Path(mark).parent),
             # a head without CPUs has no workers
             *(machine.threads(num_cpus) if num_cpus else ())]
    return NodeReport(Path(mark).is_file(), writes, version_digest(), tuple(one for one in found if one.verdict != "ok"))


def judged(where: str, found: NodeReport, folder: Path, skew_s: float) -> Iterator[Finding]:
    """Yield a finding about the node, one about its clock, and its problems."""
    from ngsgd.cluster.fingerprint import version_digest
    if found.code != version_digest():
        yield Finding("fail", "node", f"{where} has another version of ngsgd or torch", "install the same version on every machine")
    elif not found.sees:
        yield Finding("warn", "node", f"{where} does not see {folder}: its workers fetch the prepared data",
                      "nothing; a file system that all machines share avoids the transfer")
    elif not found.writes:
        yield Finding("fail", "node", f"{where} cannot write {folder}", "put output_dir on a file system that all machines share")
    else:
        yield Finding("ok", "node", f"{where} reads and writes {folder}, same ngsgd and torch")
    yield machine.clock(where, skew_s)
    for one in found.troubles:
        yield replace(one, found=f"on {where}: {one.found}")
