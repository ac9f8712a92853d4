"""A machine that stands still: all processes of a run are stopped and later continued, again and
again.

    python -m tests.chaos.freeze [--seconds 60] [--times 10] [--who all|coordinator|workers]

Starts `ngsgd train cluster.kind=local` with default deadlines and compares the final model with
that of an undisturbed run. Ends with code 1 if a worker was killed, a shard was lost, or the model
is another.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from ngsgd.files import read_json_lines
from tests import judge
from tests.chaos.invariants import TAG, tagged
from tests.integration.service import Service, events

WHO = ("all", "coordinator", "workers")
_ITERS_PER_FREEZE = 6   # outer iterations, so that the run outlasts the last freeze
_WAKE_FIRST_S = 0.2     # by which the coordinator wakes before its workers: the worst order


def freeze(coordinator: int, tag: str, seconds: float, who: str = "all", wake_first_s: float = _WAKE_FIRST_S) -> int:
    """Stops the processes of a run for a time; returns how many there were."""
    others = [process for process in tagged(tag) if process != coordinator]
    chosen = {"all": [coordinator, *others], "coordinator": [coordinator], "workers": others}[who]
    _signal(chosen, signal.SIGSTOP)
    time.sleep(seconds)
    _signal(chosen[:1], signal.SIGCONT)
    if who == "all":
        time.sleep(wake_first_s)
    _signal(chosen[1:], signal.SIGCONT)
    return len(chosen)


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def trial(seconds: float, times: int, who: str, folder: Path) -> list[str]:
    """Problems of a run of `ngsgd train` that was suspended so often; empty if there are none."""
    service = Service(folder)
    # on two workers the corpus has some six outer iterations in two epochs
    settings = [f"schedule.num_epochs={_ITERS_PER_FREEZE * times}", "cluster.num_workers=2", "cluster.threads_per_worker=1"]
    undisturbed = service.call("cluster=local", "name=undisturbed", *settings, timeout_s=1200)
    assert undisturbed.returncode == 0, undisturbed.stderr
    tag = uuid.uuid4().hex
    os.environ[TAG] = tag   # for the children of this process
    frozen = service.start("cluster=local", "name=frozen", *settings)
    del os.environ[TAG]
    num_processes = _freeze_in_turns(service, frozen, tag, seconds, times, who)
    _, told = frozen.communicate(timeout=1200)
    print(f"processes stopped each time: {num_processes}", flush=True)
    found = [] if frozen.returncode == 0 else [f"the run ended with {frozen.returncode}: {told}"]
    found += [] if len(num_processes) == times else [f"it was over after {len(num_processes)} freezes"]
    (run,) = service.runs("frozen")
    (whole,) = service.runs("undisturbed")
    found += judge.finished_run(run, models=judge.committed_models(whole))
    found += judge.not_counted(run / "ledger.jsonl")
    found += [f"incident: {one['message']}" for one in events(run, "incident")]
    ledger = read_json_lines(run / "ledger.jsonl")
    found += [f"job {line['job']} failed" for line in ledger if line["event"] == "failed"]
    found += [f"process {process} is left" for process in tagged(tag)]
    return found


def _freeze_in_turns(service: Service, process: subprocess.Popen[str], tag: str, seconds: float, times: int, who: str) -> list[int]:
    run = service.wait_for_outer_iteration(0, "frozen", process)
    found: list[int] = []
    while len(found) < times and process.poll() is None:
        before = len(events(run, "outer_iteration"))
        found.append(freeze(process.pid, tag, seconds, who))
        print(f"freeze {len(found)} of {times}: {before} outer iterations before it", flush=True)
        with contextlib.suppress(AssertionError):  # the process has ended, which the caller reports
            service.wait_for_outer_iteration(before, "frozen", process)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.freeze", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a freeze")
    parser.add_argument("--times", type=int, default=10, help="number of freezes")
    parser.add_argument("--who", choices=WHO, default="all", help="processes that are stopped")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="freeze-") as folder:
        found = trial(asked.seconds, asked.times, asked.who, Path(folder))
    print(f"{asked.times} freezes of {asked.seconds:g} s, {asked.who}: "
          f"{'; '.join(found) or 'no worker killed, no shard lost, final model bitwise equal'} "
          f"({time.monotonic() - began:.0f} s)")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
