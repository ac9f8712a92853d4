"""A Ray cluster over nodes made of namespaces, and runs on it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.service import TINY, events, final_hash
from tests.nodes.network import ROOT, Network, Node

PORT = 6379
_STORE_BYTES = 100 * 2**20
_START_S = 120.0
_RUN_S = 300.0
SETTINGS = [*(setting for setting in TINY if "num_epochs" not in setting), "schedule.num_epochs=6", "cluster.num_workers=3",
            "cluster.threads_per_worker=1", "failure.hang_timeout_s=5", "failure.max_attempts=10"]


@dataclass
class Lab:
    """A Ray cluster over the nodes of a network, and runs on it."""

    network: Network
    output_dir: Path
    logs: Path
    has_jobs: bool = False    # with a dashboard, which takes jobs
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start the head on node 0, without CPUs, and a raylet with one CPU on each other node."""
        head, *others = self.network.nodes
        self._start_ray(head, "--head", f"--port={PORT}", "--num-cpus=0", f"--include-dashboard={str(self.has_jobs).lower()}",
                        f"--temp-dir={self.network.scratch}/ray")
        for node in others:
            self._start_ray(node, f"--address={head.address}:{PORT}", "--num-cpus=1")
        for node in others:
            wait_until(lambda node=node: "Ray runtime started" in self._log(node).read_text(), _START_S,  # type: ignore[misc]
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
            wait_until(lambda: "Ray runtime started" in log.read_text(), _START_S, f"the head did not start; see {log}")

    def train(self, node: Node, name: str, *settings: str) -> subprocess.Popen[bytes]:
        """Starts a run whose coordinator is on a node."""
        address = f"cluster.address={self.network.nodes[0].address}:{PORT}"
        words = ["train", f"name={name}", f"output_dir={self.output_dir}", *SETTINGS, address, *settings]
        return node.spawn([sys.executable, "-m", "ngsgd", *words], self.run_log(name))

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
        wait_until(is_there, _RUN_S, f"{name} did not get to outer iteration {outer_iter}; see {self.run_log(name)}")
        run = self.run(name)
        assert run
        return run

    def node_with_worker(self, name: str) -> Node:
        """A node, not the coordinator's, that has a worker of the run."""
        # one that was cut off still has a worker, of an earlier run
        for node in reversed(self.network.nodes[1:]):
            if not node.is_cut and node.programs("ray::RayWorker"):
                return node
        raise AssertionError(f"no node runs a worker of {name}")

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
def lab(count: int, output_dir: Path, *, rate: float = 0.0, latency_s: float = 0.0, has_jobs: bool = False) -> Iterator[Lab]:
    """A running cluster of `count` nodes, the head included."""
    # socket paths must stay short
    with tempfile.TemporaryDirectory(prefix="ngn-", dir="/tmp") as scratch:
        logs = output_dir / "logs"
        logs.mkdir(exist_ok=True)
        with Network(count, Path(scratch), rate, latency_s) as network:
            cluster = Lab(network, output_dir, logs, has_jobs)
            cluster.start()
            yield cluster


def of_one_process(output_dir: Path, name: str, settings: list[str]) -> str:
    """The model of a run in one process."""
    words = ["train", f"name={name}", f"output_dir={output_dir}", *settings, "cluster=in_process", "--quiet"]
    subprocess.run([sys.executable, "-m", "ngsgd", *words], cwd=ROOT, check=True)
    return final_hash(next(path.parent for path in output_dir.glob(f"{name}-*/config.yaml")))


def wait_until(is_so: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(otherwise)
        time.sleep(0.05)


def told(scenario: Callable[..., dict[str, Any]], *given: Any) -> bool:
    """Runs a scenario and prints the result; whether all went well."""
    began = time.monotonic()
    try:
        figures = scenario(*given)
    except Exception:  # the others are worth running all the same
        print(f"FAILED {scenario.__name__}", traceback.format_exc(), sep="\n", flush=True)
        return False
    print(f"passed {scenario.__name__} in {time.monotonic() - began:.0f} s", json.dumps(figures, indent=1), sep="\n", flush=True)
    return True
