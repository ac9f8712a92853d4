"""Training over several machines made of namespaces: cut cables, killed nodes, a slow network.  Run it with `make nodes`.

Every run must end with the bits of one process.  Prints what was measured, as docs/multi-node.md has it; ends with 1 when a
scenario fails and with 2 when no nodes can be made here.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngsgd.errors import ClusterError
from ngsgd.training.planner_formulas import Link, central_s
from tests.integration.service import TINY, events, final_hash
from tests.nodes.network import ROOT, Network, Node, missing

_PORT = 6379
_STORE_BYTES = 100 * 2**20
_START_S = 120.0
_RUN_S = 300.0
_SETTINGS = [*(setting for setting in TINY if "num_epochs" not in setting), "schedule.num_epochs=6", "cluster.num_workers=3",
             "cluster.threads_per_worker=1", "failure.progress_timeout_s=5", "failure.max_attempts=10"]
_RATE, _LATENCY_S = 2.5e6, 0.05   # 20 Mbit/s, and 50 ms one way


@dataclass
class Lab:
    """A Ray cluster over the nodes of a network, and runs on it."""

    network: Network
    output_dir: Path
    logs: Path
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """The head on node 0, without CPUs of its own; then a raylet with one CPU on each other node."""
        head, *others = self.network.nodes
        self._start_ray(head, "--head", f"--port={_PORT}", "--num-cpus=0", "--include-dashboard=false",
                        f"--temp-dir={self.network.scratch}/ray")
        for node in others:
            self._start_ray(node, f"--address={head.address}:{_PORT}", "--num-cpus=1")
        for node in others:
            _wait_until(lambda node=node: "Ray runtime started" in self._log(node).read_text(), _START_S,  # type: ignore[misc]
                        f"Ray did not start on {node.name}; see {self._log(node)}")

    def _start_ray(self, node: Node, *arguments: str) -> None:
        log = self._log(node)
        log.write_text("")
        node.start(log)
        ray = str(Path(sys.executable).parent / "ray")
        words = [ray, "start", "--block", f"--node-ip-address={node.address}", f"--object-store-memory={_STORE_BYTES}",
                 "--disable-usage-stats", *arguments]
        self.programs.append(node.spawn(words, log))
        if "--head" in arguments:
            _wait_until(lambda: "Ray runtime started" in log.read_text(), _START_S, f"the head did not start; see {log}")

    def train(self, node: Node, name: str, *settings: str) -> subprocess.Popen[bytes]:
        """Starts a run whose coordinator is on a node."""
        address = f"cluster.address={self.network.nodes[0].address}:{_PORT}"
        words = ["train", f"name={name}", f"output_dir={self.output_dir}", *_SETTINGS, address, *settings]
        return node.spawn([sys.executable, "-m", "launcher", *words], self.run_log(name))

    def run_log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _log(self, node: Node) -> Path:
        return self.logs / f"{node.name}.log"

    def run(self, name: str) -> Path | None:
        """The folder of a run, once it is there."""
        return next((path.parent for path in self.output_dir.glob(f"{name}-*/config.yaml")), None)

    def wait_for(self, outer_iter: int, name: str) -> Path:
        """The run's folder, once it has committed that outer iteration."""
        def is_there() -> bool:
            run = self.run(name)
            return run is not None and any(line["outer_iter"] >= outer_iter for line in events(run, "outer_iteration"))
        _wait_until(is_there, _RUN_S, f"{name} did not get to outer iteration {outer_iter}; see {self.run_log(name)}")
        run = self.run(name)
        assert run
        return run

    def finish(self, process: subprocess.Popen[bytes], name: str, *, code: int = 0) -> Path:
        """The run's folder, once it has ended with that exit code."""
        try:
            ended = process.wait(timeout=_RUN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            ended = process.wait()
        run = self.run(name)
        assert ended == code and run, f"{name} ended with {ended}:\n{self.run_log(name).read_text()[-2000:]}"
        return run


@contextlib.contextmanager
def lab(count: int, output_dir: Path, *, rate: float = 0.0, latency_s: float = 0.0) -> Iterator[Lab]:
    """A running cluster of `count` nodes, the head included."""
    with tempfile.TemporaryDirectory(prefix="ngn-", dir="/tmp") as scratch:  # socket paths must stay short
        logs = output_dir / "logs"
        logs.mkdir(exist_ok=True)
        with Network(count, Path(scratch), rate, latency_s) as network:
            cluster = Lab(network, output_dir, logs)
            cluster.start()
            yield cluster


# Scenarios ------------------------------------------------------------------------------------------------------------


def over_three_nodes(cluster: Lab, expected: str) -> dict[str, Any]:
    """Parameters travel over the cables, and the bits are those of one process."""
    worker = cluster.network.nodes[1]
    before = worker.bytes_sent()
    run = cluster.finish(cluster.train(cluster.network.nodes[0], "plain"), "plain")
    _same(run, expected)
    records = events(run, "outer_iteration")
    sent, least = worker.bytes_sent() - before, _model_bytes(run) * len(records) * 0.9
    assert sent > least, f"a worker sent only {sent} bytes; its results did not pass over its cable"
    return {"outer iterations": len(records), "seconds of one": _median_s(records), "MB sent by a worker": sent / 1e6}


def a_node_is_cut_off(cluster: Lab, expected: str) -> dict[str, Any]:
    """A cable is pulled while an outer iteration runs: nothing is lost but time."""
    return _with_a_loss(cluster, "cut", lambda: _node_with_worker(cluster, "cut").cut(), expected)


def a_raylet_is_killed(cluster: Lab, expected: str) -> dict[str, Any]:
    """A node's Ray dies, and with it its worker."""
    return _with_a_loss(cluster, "raylet", lambda: _node_with_worker(cluster, "raylet").kill_program("raylet"), expected)


def the_head_is_lost(cluster: Lab, expected: str) -> dict[str, Any]:
    """The head's machine goes, and Ray's nodes follow: the run, whose coordinator is elsewhere, ends with a sentence."""
    process = cluster.train(cluster.network.nodes[1], "headless")
    cluster.wait_for(4, "headless")
    cluster.network.nodes[0].stop()
    began = time.monotonic()
    cluster.finish(process, "headless", code=ClusterError.exit_code)
    said = cluster.run_log("headless").read_text().strip().splitlines()[-1]
    assert said.startswith("ngsgd: "), said
    return {"seconds until it ended": time.monotonic() - began, "it said": said}


def resumed_on_another_cluster(cluster: Lab, expected: str) -> dict[str, Any]:
    """What the lost head's run had committed is gone on from, on a new cluster."""
    run = cluster.run("headless")
    assert run
    began = len(events(run, "outer_iteration"))
    process = cluster.network.nodes[0].spawn([sys.executable, "-m", "launcher", "resume", str(run)], cluster.run_log("headless"))
    _same(cluster.finish(process, "headless"), expected)
    in_all = len(events(run, "outer_iteration"))
    assert began < in_all, "there was nothing to go on with"
    return {"outer iterations before": began, "in all": in_all}


def over_a_slow_network(cluster: Lab, expected: str) -> dict[str, Any]:
    """What averaging takes beside the planner's formula."""
    run = cluster.finish(cluster.train(cluster.network.nodes[0], "slow"), "slow")
    _same(run, expected)
    link = Link(_RATE, _LATENCY_S, 8e9)
    return {"model MB": _model_bytes(run) / 1e6, "seconds besides the jobs": _besides_jobs_s(run),
            "planner's formula, central": central_s(3, _model_bytes(run), link)}


# Helpers --------------------------------------------------------------------------------------------------------------


def _with_a_loss(cluster: Lab, name: str, lose: Callable[[], None], expected: str) -> dict[str, Any]:
    process = cluster.train(cluster.network.nodes[0], name)
    cluster.wait_for(4, name)
    lose()
    run = cluster.finish(process, name)
    _same(run, expected)
    records = events(run, "outer_iteration")
    told = [line["message"] for line in events(run, "incident")]
    assert told, "nothing was lost: the run did not notice"
    longest = max(records[1:], key=lambda record: float(record["compute_s"]))  # the first one waits for the workers' first job
    return {"seconds of an outer iteration": _median_s(records), "of the longest": longest["compute_s"], "incidents": told}


def _node_with_worker(cluster: Lab, name: str) -> Node:
    """A node, not the coordinator's, that has a worker of the run."""
    for node in reversed(cluster.network.nodes[1:]):  # one that was cut off still has a worker, of an earlier run
        if not node.is_cut and node.programs("ray::_RayWorker"):
            return node
    raise AssertionError(f"no node runs a worker of {name}")


def _same(run: Path, expected: str) -> None:
    assert final_hash(run) == expected, f"{run} has other bits than one process"


def _median_s(records: list[dict[str, Any]]) -> float:
    return statistics.median(float(record["compute_s"]) for record in records)


def _besides_jobs_s(run: Path) -> float:
    """Median seconds of an outer iteration in which no job trains."""
    return statistics.median(float(record["compute_s"] + record["average_s"] - max(job["seconds"] for job in record["jobs"]))
                             for record in events(run, "outer_iteration"))


def _model_bytes(run: Path) -> int:
    return max(path.stat().st_size for path in run.glob("final/model.safetensors"))


def _wait_until(is_so: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(otherwise)
        time.sleep(0.05)


def _reference(output_dir: Path) -> str:
    """The model of one process."""
    words = ["train", "name=whole", f"output_dir={output_dir}", *_SETTINGS, "cluster=in_process"]
    subprocess.run([sys.executable, "-m", "launcher", *words, "--quiet"], cwd=ROOT, check=True)
    return final_hash(next(path.parent for path in output_dir.glob("whole-*/config.yaml")))


def _told(scenario: Callable[[Lab, str], dict[str, Any]], cluster: Lab, expected: str) -> bool:
    """Runs a scenario and prints what came out; whether all went well."""
    began = time.monotonic()
    try:
        figures: dict[str, Any] = scenario(cluster, expected)
    except Exception:  # the others are worth running all the same
        print(f"FAILED {scenario.__name__}", traceback.format_exc(), sep="\n", flush=True)
        return False
    print(f"passed {scenario.__name__} in {time.monotonic() - began:.0f} s", json.dumps(figures, indent=1), sep="\n", flush=True)
    return True


def main(wanted: list[str]) -> int:
    """All scenarios, or those named."""
    reason = missing()
    if reason:
        print(f"no nodes can be made here: {reason}")
        return 2
    quick: tuple[dict[str, Any], list[Callable[[Lab, str], dict[str, Any]]]] = (
        {"count": 5}, [over_three_nodes, a_node_is_cut_off, a_raylet_is_killed, the_head_is_lost])
    slow: tuple[dict[str, Any], list[Callable[[Lab, str], dict[str, Any]]]] = (
        {"count": 4, "rate": _RATE, "latency_s": _LATENCY_S}, [over_a_slow_network, resumed_on_another_cluster])
    good = True
    with tempfile.TemporaryDirectory(prefix="ngsgd-nodes-") as folder:
        expected = _reference(Path(folder))
        for network, scenarios in (quick, slow):
            chosen = [scenario for scenario in scenarios if not wanted or scenario.__name__ in wanted]
            if chosen:
                with lab(output_dir=Path(folder), **network) as cluster:
                    results = [_told(scenario, cluster, expected) for scenario in chosen]
                good = good and all(results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
