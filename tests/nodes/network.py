"""Machines on one machine: network, process, mount and host-name namespaces that share only the
file system's tree.

Each node has its own address, /proc, /dev/shm and host name, so that parameters can travel in no
other way than over its cable. Root and iproute2 are needed; `missing` names missing requirements.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.nodes.wire import DEVICE as WIRE

_BRIDGE = "ngsgd-br"
_SUBNET = "10.77.0"
_ISOLATED = ("unshare", "-m", "-p", "-u", "-f", "--kill-child", "--mount-proc")
ROOT = Path(__file__).resolve().parents[2]


def missing() -> str:
    """Why no nodes can be made here; empty if they can."""
    if os.geteuid() != 0:
        return "not root"
    for tool in ("ip", "unshare", "nsenter"):
        if not shutil.which(tool):
            return f"no {tool} (iproute2, util-linux)"
    name = f"ngsgd-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    isolated = subprocess.run([*_ISOLATED, "true"], capture_output=True, text=True, check=False)
    return f"unshare: {isolated.stderr.strip()}" if isolated.returncode else ""


@dataclass
class Network:
    """`count` nodes on one switch; node 0 is for the head.

    Without limits: veth pairs on a bridge. With a rate or a latency: a wire in user space
    (`tests.nodes.wire`), since not every kernel has netem.
    """

    count: int
    scratch: Path                 # where each node has a folder of its own mounted
    rate: float = 0.0             # bytes per second of a node's cable, each way; 0: no limit
    latency_s: float = 0.0        # one way
    nodes: list[Node] = field(default_factory=list)
    _wire: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        self.nodes = [Node(f"ngsgd-n{index}", f"{_SUBNET}.{index + 1}", self.scratch) for index in range(self.count)]
        _remove([node.name for node in self.nodes])  # left over from a run that was killed
        for node in self.nodes:
            _run(f"ip netns add {node.name}")
            _run(f"ip -n {node.name} link set lo up")
        if self.rate or self.latency_s:
            ends = [f"{node.name}={node.address}" for node in self.nodes]
            self._wire = subprocess.Popen([sys.executable, "-m", "tests.nodes.wire", str(self.rate),
                                           str(self.latency_s), *ends],
                                          cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert self._wire.stdout and self._wire.stdout.readline() == "ready\n"
        else:
            _run(f"ip link add {_BRIDGE} type bridge")
            _run(f"ip link set {_BRIDGE} up")
        for index, node in enumerate(self.nodes):
            node.device = WIRE if self._wire else "eth0"
            if not self._wire:
                _run(f"ip link add ngsgd-v{index} type veth peer name eth0 netns {node.name}")
                _run(f"ip link set ngsgd-v{index} master {_BRIDGE} up")
            _run(f"ip -n {node.name} addr add {node.address}/24 dev {node.device}")
            _run(f"ip -n {node.name} link set {node.device} up")
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()
        if self._wire:
            self._wire.kill()
            self._wire.wait()
        _remove([node.name for node in self.nodes])


@dataclass
class Node:
    """One machine: its namespaces live as long as its first process."""

    name: str
    address: str
    scratch: Path
    device: str = ""
    is_cut: bool = False
    init: subprocess.Popen[bytes] | None = None

    def cut(self) -> None:
        """Pulls the cable."""
        self.is_cut = True
        _run(f"ip -n {self.name} link set {self.device} down")

    def join(self) -> None:
        """Puts the cable back."""
        self.is_cut = False
        _run(f"ip -n {self.name} link set {self.device} up")

    def start(self, log: Path) -> None:
        """Boots it: a process that sleeps, with memory and a separate scratch folder."""
        boot = (f"hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {shlex.quote(str(self.scratch))} "
                "&& echo booted && exec sleep infinity")
        with log.open("ab") as out:
            self.init = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *_ISOLATED, "sh", "-c", boot], stdout=subprocess.PIPE, stderr=out)
        assert self.init.stdout and self.init.stdout.readline() == b"booted\n"

    def spawn(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a program on the node."""
        with log.open("ab") as out:
            return subprocess.Popen(["nsenter", "-t", str(self._first_process()), "-n", "-m", "-p", "-u", *words], cwd=ROOT,
                                    stdout=out, stderr=subprocess.STDOUT, env=_environment())

    def kill_program(self, name: str) -> None:
        """SIGKILL for all programs of that name on the node."""
        found = self.programs(name)
        assert found, f"no {name} runs on {self.name}"
        for process in found:
            os.kill(process, signal.SIGKILL)

    def programs(self, name: str) -> list[int]:
        """Processes of the node whose command begins with that name, by their numbers out here."""
        if not self.init:
            return []
        return [process for process in _processes_beside(self._first_process()) if _command(process).startswith(name)]

    def bytes_sent(self) -> int:
        """Over its cable so far."""
        shown = subprocess.run(["ip", "netns", "exec", self.name, "cat", f"/sys/class/net/{self.device}/statistics/tx_bytes"],
                               capture_output=True, text=True, check=True)
        return int(shown.stdout)

    def stop(self) -> None:
        """Switches it off: the kernel ends all its processes with the first."""
        if self.init:
            os.kill(self._first_process(), signal.SIGKILL)
            self.init.wait()
            self.init = None

    def _first_process(self) -> int:
        """`unshare`'s child: process 1 of the node, by its number out here."""
        assert self.init
        (child,) = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(child)


def _processes_beside(process: int) -> list[int]:
    """All processes of the node that a process belongs to, by their numbers out here."""
    wanted = os.readlink(f"/proc/{process}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "ns" / "pid") == wanted:
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def _command(process: int) -> str:
    try:
        return Path(Path(f"/proc/{process}/cmdline").read_text().split("\0")[0]).name
    except OSError:  # it ended meanwhile
        return ""


def _environment() -> dict[str, str]:
    # Ray gives a lost head 60 s to come back before its nodes end; here it never does
    return {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "test-nodes-0123456789abcdef",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5", "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}


def _remove(names: list[str]) -> None:
    existing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if name in existing:
            _run(f"ip netns del {name}")
    # cables outlive their namespaces where a process was left in one
    links = [Path("/sys/class/net", _BRIDGE), *Path("/sys/class/net").glob("ngsgd-v*")]
    for link in links:
        # the kernel removes the cable of a namespace itself, a moment later
        subprocess.run(["ip", "link", "del", link.name], capture_output=True, check=False)
    if left := [link.name for link in links if link.exists()]:
        raise RuntimeError(f"network links could not be removed: {', '.join(left)}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
