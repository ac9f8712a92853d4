"""Training over several machines made of namespaces: cut cables, killed nodes, a slow network. Run
it with `make nodes`.

Every run must end with the bits of one process. Prints the measurements, as
benchmarks/multi-node.md has it; ends with 1 when a scenario fails and with 2 when no nodes can be
made here.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngsgd.errors import ClusterError
from ngsgd.planning.planner import Link, travel_time_s
from tests.integration.service import events, final_hash
from tests.nodes.fetched import data_without_a_shared_disk
from tests.nodes.jobs import by_the_documented_commands
from tests.nodes.lab import SETTINGS, Lab, lab, of_one_process, told
from tests.nodes.network import missing
from tests.nodes.stored import without_a_shared_disk

_RATE, _LATENCY_S = 2.5e6, 0.05   # 20 Mbit/s, and 50 ms one way


# Scenarios ----------------------------------------------------------------------------------------


def over_three_nodes(cluster: Lab, expected: str) -> dict[str, Any]:
    """Parameters travel over the cables, and the bits are those of one process."""
    nodes = cluster.network.nodes[1:]
    before = [node.bytes_sent() for node in nodes]
    run = cluster.finish(cluster.train(cluster.network.nodes[0], "plain"), "plain")
    _same(run, expected)
    records = events(run, "outer_iteration")
    least = _model_bytes(run) * len(records) * 0.9
    # three of the nodes have a worker; which, is Ray's choice
    sent = sorted(node.bytes_sent() - earlier for node, earlier in zip(nodes, before, strict=True))[-3]
    assert sent > least, f"a worker sent only {sent} bytes; its results did not pass over its cable"
    machines = {job["host"]: job["machine"] for record in records for job in record["jobs"]}
    assert len(machines) == 3
    assert all(load["system_memory_usage_megabytes"] > 0 for load in machines.values()), "a machine did not tell its load"
    return {"outer iterations": len(records), "seconds of one": _median_s(records), "MB sent by a worker": sent / 1e6,
            "machines that told their load": sorted(machines)}


def a_node_is_cut_off(cluster: Lab, expected: str) -> dict[str, Any]:
    """A cable is pulled while an outer iteration runs: nothing is lost but time."""
    return _with_a_loss(cluster, "cut", lambda: cluster.node_with_worker("cut").cut(), expected)


def a_raylet_is_killed(cluster: Lab, expected: str) -> dict[str, Any]:
    """A node's Ray dies, and with it its worker."""
    return _with_a_loss(cluster, "raylet", lambda: cluster.node_with_worker("raylet").kill_program("raylet"), expected)


def the_head_is_lost(cluster: Lab, expected: str) -> dict[str, Any]:
    """The head is lost: the run, whose coordinator is elsewhere, ends with a message."""
    process = cluster.train(cluster.network.nodes[1], "headless")
    cluster.wait_for(4, "headless")
    cluster.network.nodes[0].stop()
    began = time.monotonic()
    cluster.finish(process, "headless", code=ClusterError.exit_code)
    said = cluster.run_log("headless").read_text().strip().splitlines()[-1]
    assert said.startswith("ngsgd: "), said
    return {"seconds until it ended": time.monotonic() - began, "it said": said}


def resumed_on_another_cluster(cluster: Lab, expected: str) -> dict[str, Any]:
    """What the lost head's run had committed is resumed, on a new cluster."""
    run = cluster.run("headless")
    assert run
    began = len(events(run, "outer_iteration"))
    process = cluster.network.nodes[0].spawn([sys.executable, "-m", "ngsgd", "resume", str(run)],
                                             cluster.run_log("headless"))
    _same(cluster.finish(process, "headless"), expected)
    in_all = len(events(run, "outer_iteration"))
    assert began < in_all, "there was nothing to go on with"
    return {"outer iterations before": began, "in all": in_all}


def over_a_slow_network(cluster: Lab, expected: str) -> dict[str, Any]:
    """The time of averaging compared with the planner's formula."""
    run = cluster.finish(cluster.train(cluster.network.nodes[0], "slow"), "slow")
    _same(run, expected)
    link = Link(_RATE, _LATENCY_S, 8e9)
    besides = [float(record["compute_s"] + record["average_s"]
                     - max(job["seconds"] for job in record["jobs"]))
               for record in events(run, "outer_iteration")]
    return {"model MB": _model_bytes(run) / 1e6,
            "seconds besides the jobs": statistics.median(besides),
            "planner's formula, by the workers": travel_time_s(3, _model_bytes(run), link, 2, num_machines=3)}


# Helpers ------------------------------------------------------------------------------------------


def _with_a_loss(cluster: Lab, name: str, lose: Callable[[], None], expected: str) -> dict[str, Any]:
    process = cluster.train(cluster.network.nodes[0], name)
    cluster.wait_for(4, name)
    lose()
    run = cluster.finish(process, name)
    _same(run, expected)
    records = events(run, "outer_iteration")
    told = [line["message"] for line in events(run, "incident")]
    assert told, "nothing was lost: the run did not notice"
    # the first one waits for the workers' first job
    longest = max(records[1:], key=lambda record: float(record["compute_s"]))
    return {"seconds of an outer iteration": _median_s(records), "of the longest": longest["compute_s"], "incidents": told}


def _same(run: Path, expected: str) -> None:
    assert final_hash(run) == expected, f"{run} has other bits than one process"


def _median_s(records: list[dict[str, Any]]) -> float:
    return statistics.median(float(record["compute_s"]) for record in records)


def _model_bytes(run: Path) -> int:
    return (run / "final/model.safetensors").stat().st_size


def main(wanted: list[str]) -> int:
    """All scenarios, or those named."""
    reason = missing()
    if reason:
        print(f"no nodes can be made here: {reason}")
        return 2
    # the head, three for workers, and one for each that a scenario takes away
    labs: list[tuple[dict[str, Any], list[Callable[[Lab, str], dict[str, Any]]]]] = [
        ({"count": 6}, [over_three_nodes, a_node_is_cut_off, a_raylet_is_killed, the_head_is_lost]),
        ({"count": 4, "rate": _RATE, "latency_s": _LATENCY_S},
         [over_a_slow_network, resumed_on_another_cluster]),
        ({"count": 4, "has_jobs": True}, [by_the_documented_commands])]
    good = True
    with tempfile.TemporaryDirectory(prefix="ngsgd-nodes-") as folder:
        expected = of_one_process(Path(folder), "whole", SETTINGS)
        for network, scenarios in labs:
            chosen = [scenario for scenario in scenarios if not wanted or scenario.__name__ in wanted]
            if chosen:
                with lab(output_dir=Path(folder), **network) as cluster:
                    results = [told(scenario, cluster, expected) for scenario in chosen]
                good = good and all(results)
        for separate in (without_a_shared_disk, data_without_a_shared_disk):
            if not wanted or separate.__name__ in wanted:
                (Path(folder) / "logs").mkdir(exist_ok=True)
                good = told(separate, Path(folder) / "logs", expected) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
