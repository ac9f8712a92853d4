"""The containers of docker/ as processes of this machine, to run what ngsgd writes for clusters.

Their commands, variables and health checks are those of the files; a stand-in for `ray` gives them
other ports and folders, since they share one machine, and listens on it alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.tiers import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
_RAY = """\
#!{bash}
# other ports and folders for containers that share a machine
set -e
words=("${{@//head:6379/127.0.0.1:{port}}}")
words=("${{words[@]//HEAD:6379/127.0.0.1:{port}}}")
words=("${{words[@]//localhost:6379/127.0.0.1:{port}}}")
words=("${{words[@]//6379/{port}}}")
case "$*" in
    "start --head"*) words+=(--temp-dir={folder}/ray --dashboard-port={dashboard} --dashboard-host=127.0.0.1) ;;
    start*) words+=(--num-cpus=2) ;;
esac
if [ "$1" = start ]; then
    words+=(--node-ip-address=127.0.0.1 --object-store-memory=100000000 --dashboard-agent-listen-port=0)
fi
exec {ray} "${{words[@]}}"
"""


@dataclass
class Machines:
    """Containers by name, and the environment of each."""

    folder: Path
    port: int
    dashboard: int
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    def start(self, name: str) -> None:
        """Start a service of compose.yaml and wait until it is healthy."""
        service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"][name]
        here = self.folder / name
        here.mkdir()
        given = {key: re.sub(r"\$\{(\w+):\?.*\}", lambda found: os.environ.get(found[1], "t" * 64), value)
                 for key, value in service["environment"].items()}
        self.environments[name] = {**self.base(), **of_image(), **given}
        with (here / "log").open("wb") as log:
            words = [self._script("entrypoint.sh", name), *service["command"]]
            self.processes[name] = subprocess.Popen(words, stdout=log, stderr=log, env=self.environments[name], cwd=here,
                                                    start_new_session=True)
        deadline = time.monotonic() + HANGS_S
        image = (DOCKER / "Dockerfile").read_text()
        [check] = re.findall(r'^HEALTHCHECK .*CMD \["(.*)"\]$', image, re.MULTILINE)
        while self.call(name, *shlex.split(check)).returncode:
            assert self.processes[name].poll() is None and time.monotonic() < deadline, (here / "log").read_text()
            time.sleep(0.5)

    def call(self, name: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A command in a container, as `docker compose exec` gives it."""
        program = self._script(words[0], name) if (DOCKER / words[0]).is_file() else words[0]
        return subprocess.run([program, *words[1:]], env={**self.environments[name], **more}, cwd=self.folder / name,
                              capture_output=True, text=True, check=False, timeout=HANGS_S)

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            process.wait(timeout=HANGS_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def base(self) -> dict[str, str]:
        """Variables that a process of this test run needs, and the image has not."""
        return {"PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self.folder),
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8",
                # kernels are compiled once
                "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")}

    def _script(self, script: str, name: str) -> str:
        """A copy whose absolute folders are those of the container."""
        copy = self.folder / name / script
        text = (DOCKER / script).read_text().replace("/tmp/role", str(self.folder / name / "role"))
        copy.write_text(text.replace("/shared", str(self.folder / "shared")))
        copy.chmod(0o700)
        return str(copy)


@contextlib.contextmanager
def machines() -> Iterator[Machines]:
    """No container yet; all are ended at the end."""
    # socket paths must stay short
    with tempfile.TemporaryDirectory(prefix="ngm-", dir="/tmp") as name:
        found = Machines(Path(name), free_port(), free_port())
        (found.folder / "bin").mkdir()
        (found.folder / "shared").mkdir()
        ray = found.folder / "bin" / "ray"
        ray.write_text(_RAY.format(bash=shutil.which("bash"), port=found.port, dashboard=found.dashboard, folder=found.folder,
                                   ray=Path(sys.executable).parent / "ray"))
        ray.chmod(0o700)
        try:
            yield found
        finally:
            found.close()
            end_processes(found.folder)


def end_processes(folder: Path | str) -> None:
    """Kill the processes of Ray that have a file in the folder; they run in the background."""
    for process in psutil.process_iter(["cmdline"]):
        if f"{folder}/" in " ".join(process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def of_image() -> dict[str, str]:
    """ENV of the Dockerfile, but for PATH."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    found = dict(word.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE) for word in line.split())
    del found["PATH"]
    return found


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a RayJob, head first."""
    cluster = manifest["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
