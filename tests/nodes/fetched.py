"""Worker machines that see no folder of the coordinator, and fetch the prepared data."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.nodes.lab import PORT, SETTINGS, wait_until
from tests.nodes.network import Node
from tests.nodes.stored import Machines, machines_with_service
from tests.object_storage.service import BUCKET

_RAY = str(Path(sys.executable).parent / "ray")
_STORE_BYTES = 100 * 2**20
_START_S = 120.0
_STORE = f"s3://{BUCKET}/data"
# SHA-256 of the last model of a run, and seconds of its training
_RESULT = ("import json, sys; from pathlib import Path; from tests.integration.service import events, final_hash; "
           "run = next(Path('runs').glob(sys.argv[1] + '-*')); "
           "print(json.dumps([final_hash(run), events(run, 'outer_iteration')[-1]['elapsed_s']]))")
_EMPTY = "import shutil; shutil.rmtree('cache/ngsgd/archives')"
_CACHED = ("import json; from pathlib import Path; "
           "sizes = [path.stat().st_size for path in Path('cache/ngsgd/archives').glob('[0-9a-f]*')]; "
           "print(json.dumps([len(sizes), sum(sizes)]))")


def data_without_a_shared_disk(logs: Path, expected: str, *, rate: float = 0.0, latency_s: float = 0.0,
                               settings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train with a shared folder of data, then from the coordinator, then from object storage."""
    with (tempfile.TemporaryDirectory(prefix="ngsgd-shared-") as shared,
          machines_with_service(4, logs, rate, latency_s) as machines):
        nodes = machines.network.nodes[1:]
        _start_ray(machines)
        figures: dict[str, Any] = {"shared folder": _trained(machines, "shared", expected, f"data.cache_dir={shared}", *settings)}
        figures["from the coordinator"] = _trained(machines, "coordinator", expected, *settings)
        figures["in the cache of each node"] = [_cached(machines, node) for node in nodes]
        figures["from the cache"] = _trained(machines, "again", expected, *settings)
        for node in nodes:
            machines.says(node, f"empty-{node.name}", "-c", _EMPTY)
        figures["from object storage"] = _trained(machines, "store", expected, f"data.store={_STORE}", *settings)
        return figures


def _trained(machines: Machines, name: str, expected: str, *settings: str) -> dict[str, float]:
    """Train, compare the model, and return the seconds of training and the bytes of the head."""
    head, *others = machines.network.nodes
    before = head.bytes_sent()
    given = {setting.split("=")[0] for setting in settings}
    usual = [setting for setting in SETTINGS if setting.split("=")[0] not in given]
    machines.says(head, name, "-m", "ngsgd", "train", f"name={name}", "output_dir=runs", *usual,
                  f"cluster.address={head.address}:{PORT}", *settings)
    digest, seconds = json.loads(machines.says(head, f"result-{name}", "-c", _RESULT, name).splitlines()[-1])
    assert not expected or digest == expected, f"{name} has other bits than one process"
    unseen = set(re.findall(r"node (\S+) \S+ does not see", machines.log(name).read_text()))
    assert unseen == (set() if name == "shared" else {node.name for node in others}), unseen
    return {"seconds of training": round(seconds, 1), "MB sent by the head": round((head.bytes_sent() - before) / 1e6, 1)}


def _start_ray(machines: Machines) -> None:
    """Start Ray's head on the first node, and Ray with one CPU on each other."""
    head, *others = machines.network.nodes
    of_head = [f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={machines.network.scratch}/ray"]
    for node in (head, *others):
        about = ["--head", *of_head] if node is head else [f"--address={head.address}:{PORT}", "--num-cpus=1"]
        machines.start(node, f"ray-{node.name}", _RAY, "start", "--block", f"--node-ip-address={node.address}",
                       f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats", *about)
        if node is head:
            wait_until(lambda: machines.has(f"ray-{head.name}", "Ray runtime started"), _START_S, "the head did not start")
    for node in others:
        wait_until(lambda node=node: machines.has(f"ray-{node.name}", "Ray runtime started"), _START_S,  # type: ignore[misc]
                   f"Ray did not start on {node.name}; see {machines.log(f'ray-{node.name}')}")


def _cached(machines: Machines, node: Node) -> list[float]:
    number, num_bytes = json.loads(machines.says(node, f"cached-{node.name}", "-c", _CACHED))
    assert number, f"{node.name} has fetched nothing"
    return [number, num_bytes / 1e6]
