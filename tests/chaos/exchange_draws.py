"""Drawn faults of the exchange among workers: each run must end with the bits of one process.

    python -m tests.chaos.exchange_draws [--cases 200] [--first 0]

A worker of a small run, its coordinator or both are killed or stopped, or a worker loses its
connections. This happens before, inside or after a collective operation: a proof of the members,
the exchange of results, that of the model. A coordinator that was killed is started again, one that
was stopped continues after a second. The number of a case is its seed. Ends with code 1 if a case
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ngsgd import process_identity
from ngsgd.cluster.exchange import collective_client, process_group
from ngsgd.cluster.groups import make_worker
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, FailureConfig, OuterConfig, RunConfig
from ngsgd.training.storage.audit import audit
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Worker
from tests.toy import Run, config, undisturbed

# of a group, and twice as many until a silent member is killed: busy machines take some
TIMEOUT_S = 16.0
_STOPPED_S = 1.0
_ALLOWED = {"worker_died", "exchange_failed", "worker_replaced", "job_continued"}


@dataclass(frozen=True)
class Draw:
    """A case."""

    who: Literal["owner", "coordinator", "both"]
    how: Literal["kill", "stop", "cut"]
    when: Literal["before", "inside", "after"]
    call: int  # of the collective operations of the victim: two proofs, then two for each step
    victim: int
    num_workers: int
    outer: OuterConfig
    compression: Literal["none", "int8", "sparse"]

    @classmethod
    def of(cls, seed: int) -> Draw:
        chance = random.Random(seed)
        who = chance.choice(["owner", "owner", "coordinator", "both"])
        num_workers = chance.choice([2, 3, 4])
        return cls(who, chance.choice(["kill", "stop", "cut"] if who == "owner" else ["kill", "stop"]),  # type: ignore[arg-type]
                   chance.choice(["before", "inside", "after"]), chance.randint(1, 8), chance.randrange(num_workers), num_workers,
                   chance.choice([OuterConfig("average"), OuterConfig("bmuf", gain=1.5), OuterConfig("diloco")]),
                   chance.choice(["none", "none", "int8", "sparse"]))

    def config(self) -> RunConfig:
        schedule = replace(config().schedule, num_jobs_initial=self.num_workers, num_jobs_final=self.num_workers, num_epochs=1.5)
        cluster = ClusterConfig("local", num_workers=self.num_workers, threads_per_worker=1, exchange="collective",
                                compression=self.compression)
        return config(cluster=cluster, schedule=schedule, outer=self.outer, failure=FailureConfig(hang_timeout_s=60.0))


@dataclass(frozen=True)
class Disturbed:
    """Makes workers; the fault happens in one of them, once."""

    draw: Draw
    marker: Path
    coordinator: int  # process

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        whole, calls, draw = process_group.Group.all_to_all, itertools.count(1), self.draw

        def all_to_all(group: Any, *arguments: Any) -> Any:
            is_it = next(calls) == draw.call and not self.marker.exists()
            if is_it and index == draw.victim:
                if draw.when == "before":
                    self.act()
                elif draw.when == "inside":
                    threading.Timer(0.1, self.act).start()
            elif is_it and draw.when == "inside":
                # so that the victim waits for this member then
                time.sleep(0.3)
            found = whole(group, *arguments)
            if is_it and index == draw.victim and draw.when == "after":
                self.act()
            return found
        process_group.Group.all_to_all = all_to_all  # type: ignore[method-assign, assignment]
        return make_worker(spec, index)

    def act(self) -> None:
        self.marker.touch()
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(self.draw.how)
        if number is None:
            cut_connections()
            return
        if self.draw.who != "owner":
            os.kill(self.coordinator, number)
        if self.draw.who != "coordinator":
            os.kill(os.getpid(), number)


def cut_connections() -> None:
    """Shut down all TCP connections of this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        # others are no sockets, or listen
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)


def train(draw: Draw, folder: Path) -> list[str]:
    """Train, or resume; return the problems that its end shows."""
    run = Run(folder, draw.config())
    pool = ProcessPool(run.spec, draw.num_workers, 1, run.store.layout.size)
    pool.make_worker = Disturbed(draw, folder / "disturbed", os.getpid())
    end = run.train(pool)
    problems = [str(problem) for problem in audit(run.ledger_path)]
    if end.model_sha256 != undisturbed(draw.config()).model_sha256:
        problems.append("the model has other bits than that of one process")
    for incident in run.recorder.incidents:
        if incident.what not in _ALLOWED or (incident.what == "worker_died" and incident.worker != draw.victim):
            problems.append(incident.message)
    return problems


def problems_of(seed: int, folder: Path) -> list[str]:
    """Run a case; return its problems."""
    draw, timeout_s = Draw.of(seed), collective_client.EXCHANGE_TIMEOUT_S
    collective_client.EXCHANGE_TIMEOUT_S = TIMEOUT_S
    try:
        if draw.who != "owner":
            child = subprocess.Popen([sys.executable, "-m", "tests.chaos.exchange_draws", "--one", str(seed), str(folder)])
            while child.poll() is None:
                if process_identity.state_and_start_time(child.pid)[0] == "T":
                    time.sleep(_STOPPED_S)
                    os.kill(child.pid, signal.SIGCONT)
                time.sleep(0.05)
            if draw.how == "stop":
                return [] if child.returncode == 0 and (folder / "disturbed").exists() else [f"it ended with {child.returncode}"]
            if child.returncode != -signal.SIGKILL:
                return [f"the coordinator was not killed: {child.returncode}"]
        found = train(draw, folder)
    finally:
        collective_client.EXCHANGE_TIMEOUT_S = timeout_s
    return found if (folder / "disturbed").exists() else [*found, "the fault did not happen"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.exchange_draws", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--one", nargs=2, metavar=("SEED", "FOLDER"), help="run the coordinator of a case")
    options = parser.parse_args()
    if options.one:
        collective_client.EXCHANGE_TIMEOUT_S = TIMEOUT_S
        problems = train(Draw.of(int(options.one[0])), Path(options.one[1]))
        print(*problems, sep="\n", flush=True)
        return bool(problems)
    failed = 0
    for seed in range(options.first, options.first + options.cases):
        with tempfile.TemporaryDirectory(prefix="draw-") as folder:
            began = time.monotonic()
            problems = problems_of(seed, Path(folder))
        failed += bool(problems)
        draw = Draw.of(seed)
        print(f"{seed}: {draw.who} {draw.how} {draw.when} call {draw.call} of worker {draw.victim} of {draw.num_workers}, "
              f"{draw.outer.kind}, {draw.compression}: {'; '.join(problems) or 'passed'} ({time.monotonic() - began:.0f} s)",
              flush=True)
    print(f"{options.cases - failed} of {options.cases} cases passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
