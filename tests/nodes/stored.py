"""Machines without a shared disk: one is lost, and another resumes from object storage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.errors import EXIT_OK
from tests.nodes.lab import SETTINGS, wait_until
from tests.nodes.network import Network, Node
from tests.object_storage.service import BUCKET, Service

PORT = 9000
_URL = f"s3://{BUCKET}/runs"
_COMMAND_S = 400.0
# of the model, as this machine reads it
_DIGEST = ("import sys; from ngsgd.runs import stored_run; from tests.integration.service import final_hash; "
           "print(final_hash(stored_run.fetched(sys.argv[1])))")


@dataclass
class Machines:
    """Nodes whose home, cache and working folder are their own; node 0 runs the service."""

    network: Network
    logs: Path

    def start(self, node: Node, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a program in the folder of a node that no other node sees."""
        own = self.network.scratch
        where = [f"HOME={own}", f"XDG_CACHE_HOME={own}/cache", f"TMPDIR={own}"]
        service = Service.environment_of(f"http://{self.network.nodes[0].address}:{PORT}")
        return node.spawn(["env", f"--chdir={own}", *where, *(f"{key}={value}" for key, value in service.items()),
                           sys.executable, *words], self.log(name))

    def says(self, node: Node, name: str, *words: str) -> str:
        """Return the output of a program that must succeed."""
        code = self.start(node, name, *words).wait(_COMMAND_S)
        said = self.log(name).read_text()
        assert code == EXIT_OK, f"{' '.join(words)} ended with {code}:\n{said[-2000:]}"
        return said

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def has(self, name: str, pattern: str) -> bool:
        return re.search(pattern, self.log(name).read_text()) is not None


@contextmanager
def machines_with_service(count: int, logs: Path, rate: float = 0.0,
                          latency_s: float = 0.0) -> Iterator[Machines]:
    """Running nodes, and the service on the first."""
    with (tempfile.TemporaryDirectory(prefix="ngn-", dir="/tmp") as scratch,
          Network(count, Path(scratch), rate, latency_s) as network):
        machines, first = Machines(network, logs), network.nodes[0]
        for node in network.nodes:
            node.start(machines.log(node.name))
        machines.log("service").unlink(missing_ok=True)
        machines.start(first, "service", "-m", "tests.object_storage.service", first.address,
                       str(PORT))
        wait_until(lambda: machines.has("service", "ready"), 120.0,
                   f"no service; see {machines.log('service')}")
        yield machines


def without_a_shared_disk(logs: Path, expected: str) -> dict[str, Any]:
    """Train on one machine, lose it, resume on a second one, and read the model on a third."""
    ngsgd = ("-m", "ngsgd")
    with machines_with_service(4, logs) as machines:
        _, first, second, third = machines.network.nodes
        training = machines.start(first, "train", *ngsgd, "train", "name=stored", f"output_dir={_URL}", *SETTINGS)
        wait_until(lambda: machines.has("train", r"iter +5/") or training.poll() is not None, _COMMAND_S, "no outer iteration")
        assert training.poll() is None, machines.log("train").read_text()[-2000:]
        first.stop()
        lost = time.monotonic()
        (run,) = re.findall(r"stored-\S+", machines.says(second, "status", *ngsgd, "status", _URL))[:1]
        machines.says(second, "resume", *ngsgd, "resume", f"{_URL}/{run}")
        resumed_s = time.monotonic() - lost
        digest = machines.says(third, "digest", "-c", _DIGEST, f"{_URL}/{run}").split()[-1]
        assert digest == expected, f"{run} has other bits than one process"
        status = json.loads(machines.says(third, "report", *ngsgd, "status", f"{_URL}/{run}", "--json"))
        assert status["is_finished"], status
        begun = min(map(int, re.findall(r"iter +(\d+)/", machines.log("resume").read_text())))
        assert begun > 1, "the run began again"
        return {"first outer iteration after the loss": begun, "seconds from the loss to the end": resumed_s,
                "result on a third machine": status["wer"]}
