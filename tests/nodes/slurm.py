"""A real Slurm over nodes made of namespaces, and what `ngsgd submit --to slurm` gives it. Run it
with `make slurm`.

The daemons are those of the machine (Debian: slurm-wlm, munge); nothing of the machine's own
configuration is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngsgd.errors import EXIT_OK
from tests.integration.service import events, final_hash
from tests.nodes.lab import SETTINGS, of_one_process, told, wait_until
from tests.nodes.network import Network, Node, missing

_NUM_NODES = 2
_RUN_S = 600.0
_BIN = Path(sys.executable).parent
_LIMIT = "0:03:00"  # a warning comes two minutes before the limit: after one minute of three
_CONF = """\
ClusterName=lab
SlurmctldHost={head}({head_address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Slurm:
    """Controller on node 0, a slurmd on each other node."""

    network: Network
    folder: Path                 # state, logs and the munge key
    output_dir: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        head, *others = self.network.nodes
        nodes = [f"NodeName={node.name} NodeAddr={node.address} CPUs=1 State=UNKNOWN" for node in others]
        (self.folder / "slurm.conf").write_text(_CONF.format(
            head=head.name, head_address=head.address, folder=self.folder, nodes="\n".join(nodes)))
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{node.address} {node.name}\n" for node in self.network.nodes))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        # the plugin for version 1 asks for no mounted control groups, which a namespace does not
        # have
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for place in ("state", "munge", *(f"spool-{node.name}" for node in others)):
            (self.folder / place).mkdir()
        for node in self.network.nodes:
            node.start(self.folder / f"{node.name}.log")
            self.call(node, "mount", "--bind", str(self.folder / "hosts"), "/etc/hosts")
        self._daemon(head, "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
                     f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munge/munged.pid",
                     f"--log-file={self.folder}/munge/munged.log", f"--seed-file={self.folder}/munge/munged.seed")
        wait_until((self.folder / "munge.socket").exists, 20.0, f"munged did not start; see {self.folder}")
        self._daemon(head, "slurmctld", "-D")
        for node in others:
            self._daemon(node, "slurmd", "-D", "-N", node.name)
        idle = ["sinfo", "--noheader", "--format=%T %D", "--partition=low"]
        wait_until(lambda: self.call(head, *idle).split() == ["idle", str(len(others))], 60.0, f"no idle nodes; see {self.folder}")

    def stop(self) -> None:
        for daemon in self.daemons:
            daemon.terminate()
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)

    def call(self, node: Node, *words: str, code: int = EXIT_OK) -> str:
        """Output of a command on a node, once it has ended with that exit code."""
        log = self.folder / f"command-{time.monotonic_ns()}.log"
        ended = node.spawn(self._set(words), log).wait(120.0)
        said = log.read_text()
        log.unlink()
        assert ended == code, f"{' '.join(words)} ended with {ended}:\n{said[-2000:]}"
        return said

    def submit(self, name: str, *settings: str, partition: str = "low") -> str:
        """By the documented command; the job's number."""
        words = ["submit", "--to", "slurm", "--job-name", name, "--nodes", str(_NUM_NODES),
                 "--cpus-per-node", "1", "--time", _LIMIT, "--partition", partition, f"output_dir={self.output_dir}", *settings]
        said = self.call(self.network.nodes[0], str(_BIN / "ngsgd"), *words)
        found = re.search(r"Slurm job (\d+)", said)
        assert found, said
        return found[1]

    def state(self, job: str) -> str:
        return self._field(job, "JobState")

    def restarts(self, job: str) -> int:
        return int(self._field(job, "Restarts"))

    def run(self, name: str, job: str) -> Path | None:
        return next((path.parent for path in self.output_dir.glob(f"{name}-{job}-*/config.yaml")), None)

    def wait_for(self, outer_iters: int, name: str, job: str) -> Path:
        """The run's folder, once it has committed so many outer iterations."""
        def is_there() -> bool:
            run = self.run(name, job)
            return run is not None and len(events(run, "outer_iteration")) >= outer_iters
        wait_until(is_there, _RUN_S, f"{name} has no {outer_iters} outer iterations; see {self.log(job)}")
        run = self.run(name, job)
        assert run
        return run

    def wait_until_ended(self, job: str) -> str:
        """Its last state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

        def is_over() -> bool:
            state = self.state(job)
            if state == "PENDING":
                # in Slurm, a job that was queued again waits for two minutes
                self.call(self.network.nodes[0], "scontrol", "update", f"JobId={job}",
                          "StartTime=now")
            time.sleep(0.5)
            return state in over
        wait_until(is_over, _RUN_S, f"job {job} does not end; see {self.log(job)}")
        return self.state(job)

    def log(self, job: str) -> Path:
        return self.folder / f"ngsgd-{job}.log"

    def _field(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.call(self.network.nodes[0], "scontrol", "show", "job", job))
        assert found
        return found[1]

    def _daemon(self, node: Node, *words: str) -> None:
        program = shutil.which(words[0], path=f"{os.environ['PATH']}:/usr/sbin")
        assert program
        self.daemons.append(node.spawn(self._set((program, *words[1:])), self.folder / f"{words[0]}-{node.name}.out"))

    def _set(self, words: tuple[str, ...]) -> list[str]:
        """With this Slurm's configuration, and our programs first."""
        return ["env", f"--chdir={self.folder}", "-u", "RAY_AUTH_TOKEN", "-u", "RAY_AUTH_MODE",
                f"SLURM_CONF={self.folder}/slurm.conf",
                f"PATH={_BIN}:{os.environ['PATH']}:/usr/sbin", *words]


# Scenarios ----------------------------------------------------------------------------------------


def warned_at_the_time_limit(slurm: Slurm, expected: Callable[[list[str]], str]) -> dict[str, Any]:
    """Slurm's warning ends the run in time; the job queues again and resumes."""
    settings = [*_settings(epochs=120), "cluster.num_workers=2"]
    job = slurm.submit("limit", *settings)
    slurm.wait_for(1, "limit", job)
    began = time.monotonic()
    wait_until(lambda: slurm.restarts(job) > 0, 150.0, f"job {job} was not queued again; see {slurm.log(job)}")
    warned_s = time.monotonic() - began
    run = slurm.wait_for(1, "limit", job)
    before = len(events(run, "outer_iteration"))
    assert slurm.wait_until_ended(job) == "COMPLETED"
    in_all = len(events(run, "outer_iteration"))
    assert 0 < before < in_all and len(list(slurm.output_dir.glob("limit-*/config.yaml"))) == 1
    assert final_hash(run) == expected(settings), f"{run} has other bits than one process"
    return {"seconds of training before it was queued again": warned_s, "restarts": slurm.restarts(job),
            "outer iterations before the first": before, "in all": in_all}


def preempted(slurm: Slurm, expected: Callable[[list[str]], str]) -> dict[str, Any]:
    """A job that goes first takes the nodes; the run saves, and continues when they are free."""
    return _gives_way(slurm, "gives-way", expected)


def preempted_without_a_word(slurm: Slurm, expected: Callable[[list[str]], str]) -> dict[str, Any]:
    """The same without a warning: Ray ends first, and the run still continues."""
    conf = slurm.folder / "slurm.conf"
    conf.write_text(conf.read_text().replace("SlurmctldParameters=preempt_send_user_signal\n", ""))
    slurm.call(slurm.network.nodes[0], "scontrol", "reconfigure")
    return _gives_way(slurm, "unwarned", expected)


def _gives_way(slurm: Slurm, name: str, expected: Callable[[list[str]], str]) -> dict[str, Any]:
    settings = [*_settings(epochs=40), "cluster.num_workers=2"]
    job = slurm.submit(name, *settings)
    run = slurm.wait_for(4, name, job)
    urgent = slurm.call(slurm.network.nodes[0], "sbatch", "--parsable", "--partition=high", f"--nodes={_NUM_NODES}",
                        "--output=/dev/null", "--wrap", "sleep 2").strip()
    began = time.monotonic()
    wait_until(lambda: slurm.state(urgent) == "COMPLETED", 150.0, f"job {urgent} did not get the nodes; see {slurm.folder}")
    took_s, before = time.monotonic() - began, len(events(run, "outer_iteration"))
    assert slurm.wait_until_ended(job) == "COMPLETED"
    in_all = len(events(run, "outer_iteration"))
    assert slurm.restarts(job) == 1 and before < in_all
    assert final_hash(run) == expected(settings), f"{run} has other bits than one process"
    return {"seconds until the urgent job had ended": took_s, "outer iterations before": before, "in all": in_all}


def cancelled(slurm: Slurm, _: Callable[[list[str]], str]) -> dict[str, Any]:
    """scancel ends it for good, after it has saved; nothing of Ray is left on the nodes."""
    job = slurm.submit("unwanted", *_settings(epochs=400), "cluster.num_workers=2")
    run = slurm.wait_for(4, "unwanted", job)
    began = time.monotonic()
    slurm.call(slurm.network.nodes[0], "scancel", job)
    assert slurm.wait_until_ended(job) == "CANCELLED"
    ended_s = time.monotonic() - began
    wait_until(lambda: not any(node.programs("raylet") for node in slurm.network.nodes), 60.0, "a raylet was left")
    assert slurm.restarts(job) == 0
    return {"seconds until it had ended": ended_s, "outer iterations": len(events(run, "outer_iteration"))}


def _settings(epochs: int) -> list[str]:
    dropped = ("schedule.num_epochs", "cluster.num_workers")
    return [*(one for one in SETTINGS if not one.startswith(dropped)), f"schedule.num_epochs={epochs}"]


@contextlib.contextmanager
def _slurm(output_dir: Path) -> Iterator[Slurm]:
    # socket paths must stay short
    with tempfile.TemporaryDirectory(prefix="ngs-", dir="/tmp") as scratch:
        folder = output_dir / "slurm"
        folder.mkdir()
        with Network(1 + _NUM_NODES, Path(scratch)) as network:
            slurm = Slurm(network, folder, output_dir)
            try:
                slurm.start()
                yield slurm
            finally:
                slurm.stop()


def main(wanted: list[str]) -> int:
    """All scenarios, or those named."""
    lacking = missing() or next((f"no {tool} (slurm-wlm, munge)" for tool in ("slurmctld", "slurmd", "sbatch", "munged")
                                 if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin")), "")
    if lacking:
        print(f"no Slurm can be made here: {lacking}")
        return 2
    every = (warned_at_the_time_limit, preempted, cancelled, preempted_without_a_word)
    scenarios = [one for one in every if not wanted or one.__name__ in wanted]
    with tempfile.TemporaryDirectory(prefix="ngsgd-slurm-") as folder, _slurm(Path(folder)) as slurm:
        def expected(settings: list[str]) -> str:
            return of_one_process(Path(folder), f"alone-{abs(hash(tuple(settings)))}", settings)
        results = [told(scenario, slurm, expected) for scenario in scenarios]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
