"""Storm: 32 worker processes, 1-second jobs, 125 faults an hour at random times.

    python -m tests.chaos.storm [--workers 32] [--minutes 30] [--faults-per-hour 125]

Workers mostly sleep, as in the soak test, so that each stands for a separate machine. A fault is
SIGKILL (7 of 11), SIGTERM, SIGSTOP or an exception for one worker, or SIGKILL for the
coordinator. A killed coordinator is started again at once and resumes the run. The program reports
for each fault

- the recovery: seconds from the fault until the lost work runs again. It begins with the next
  attempt of the lost job, or with the first job after the death of the coordinator. A fault that
  hits an idle worker has none;
- the replacement: seconds from the fault until all workers are ready again;
- the participation in the next outer iteration: counted contributions, and workers among them.

At the end the ledger is audited, the model is compared with that of a run without faults, and
nothing may be left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ngsgd.config import OptimizerConfig, RunConfig
from ngsgd.files import JsonLines, read_json_lines
from ngsgd.launcher.reports.efficiency import Efficiency, efficiency_of
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.event_log import read_events
from tests import judge
from tests.chaos import soak
from tests.chaos.invariants import TAG, Surroundings
from tests.chaos.recorded import RecordedRun
from tests.chaos.steady import MarkingWorker, mark_of

COORDINATOR = "coordinator"
KINDS = (*soak.KINDS, COORDINATOR)
_STEP_S = 0.002
_REST_S = 15.0  # after the last fault, for the recovery
_INTERRUPTED, _KILLED = 130, -9
# without a main module of the file system, which each worker would import
_COORDINATE = "import sys; sys.argv[0] = 'storm'; from tests.chaos.storm import main; sys.exit(main())"


def config_of(plan: soak.Plan) -> RunConfig:
    """That of the soak test with plain SGD, because all workers share few processors."""
    return replace(soak.config_of(plan), optimizer=OptimizerConfig("sgd"))


# Faults -----------------------------------------------------------------------------------------


@dataclass
class Fault:
    """A fault and its consequences; times are in seconds after it."""

    kind: str
    worker: int
    at: float                       # unix time
    lost: tuple[int, int, int] | None  # outer iteration, job, attempt; None if the worker was idle
    outer_iter: int
    recovery_s: float = math.nan
    all_ready_s: float = math.nan
    num_counted: int = 0  # of the next outer iteration
    num_contributors: int = 0


def drawn(plan: soak.Plan, num_faults: int) -> list[tuple[float, str, int]]:
    """Seconds after the start, kind and worker of each fault, in order."""
    chance = random.Random(plan.seed)
    times = sorted(chance.uniform(0.0, plan.faulty_s) for _ in range(num_faults))
    return [(at, chance.choice(KINDS), chance.randrange(plan.num_workers)) for at in times]


@dataclass
class Storm(soak.Trouble):
    """Injects faults and observes the pool.

    A file has the faults so far, because the coordinator is among its victims.
    """

    due: list[tuple[float, str, int]]

    def start(self) -> None:
        began = self.folder / "began"
        if not began.exists():
            began.write_text(str(time.time()))
        self.began = float(began.read_text())
        self.lines = JsonLines(self.folder / "faults.jsonl")
        del self.due[:sum("kind" in line for line in read_json_lines(self.folder / "faults.jsonl"))]
        self.lines.append({"all_ready": time.time()})

    def requested(self) -> bool:
        return time.time() - self.began > self.plan.faulty_s + _REST_S

    def go_on(self) -> None:
        was_short = False
        while not self.over.wait(_STEP_S):
            if self.due and time.time() - self.began >= self.due[0][0]:
                self._strike(*self.due.pop(0)[1:])
                was_short = False
            # a death is noticed later; a fault that kills nobody never shows
            is_complete = self.pool.num_workers_alive() == self.plan.num_workers
            if is_complete and was_short:
                self.lines.append({"all_ready": time.time()})
            was_short = not is_complete

    def _strike(self, kind: str, worker: int) -> None:
        progress = self.pool.progress()
        lost = progress[worker][0] if worker in progress else None
        running = max((identity[0] for identity, _ in progress.values()), default=-1)
        self.lines.append(asdict(Fault(kind, worker, time.time(), lost, running)))
        if kind == COORDINATOR:
            os.kill(os.getpid(), 9)
        soak.strike(self.pool, self.folder, kind, worker)


def coordinate(plan: soak.Plan, folder: Path, num_faults: int) -> int:
    """Train in this process until it is killed or time is over; return the exit code."""
    run = RecordedRun(folder, config_of(plan))
    pool = soak.pool_of(plan, run, soak.steady(plan, folder, MarkingWorker))
    storm = Storm(plan, pool, folder, drawn(plan, num_faults))
    storm.train(run)
    storm.lines.close()
    return _INTERRUPTED


# Report -----------------------------------------------------------------------------------------


@dataclass
class Report:
    """The outcome; `problems` is empty if no work was lost."""

    plan: soak.Plan
    faults: list[Fault]
    efficiency: Efficiency
    num_resumed: int
    seconds: float
    median_s: float                 # duration of an outer iteration
    load: float
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        num, faults = self.plan.num_workers, self.faults
        kinds = Counter(one.kind for one in faults)
        lowest = min(((one.num_counted, one.num_contributors) for one in faults), default=(0, 0))
        full = sum(one.num_counted == num for one in faults)
        own = sum(one.num_contributors == num for one in faults)
        kept = self.efficiency.num_counted / self.seconds * self.median_s / num
        return "\n".join([
            f"faults                    {len(faults)}: {', '.join(f'{n} x {kind}' for kind, n in kinds.most_common())}",
            f"contributions             {self.efficiency.num_counted} of {self.efficiency.num_possible} counted "
            f"({self.efficiency.participation:.2%})",
            f"next outer iteration      {full} of {len(faults)} with {num}/{num} contributions, {own} from {num} workers; "
            f"lowest {lowest[0]} from {lowest[1]} workers",
            f"recovery, s               {_spread([one.recovery_s for one in faults])}",
            *(f"  {kind:23} {_spread([one.recovery_s for one in faults if one.kind == kind])}" for kind in kinds),
            f"all workers ready, s      {_spread([one.all_ready_s for one in faults if one.kind != 'exception'])}",
            f"coordinator resumed       {self.num_resumed} times",
            f"throughput                {kept:.1%} of that of the median outer iteration ({self.median_s:.3f} s)",
            f"effective training time   {self.efficiency.effective_share:.1%}",
            f"duration, load            {self.seconds:.0f} s, {self.load:.1f}",
            "problems                  " + ("none: ledger consistent, model bitwise identical, nothing left behind"
                                            if not self.problems else "\n  ".join(["", *self.problems]))])


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return "none"
    tenth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"median {statistics.median(ordered):.3f}, 90 % below {tenth:.3f}, most {ordered[-1]:.3f} ({len(ordered)} faults)"


def storm_of(plan: soak.Plan, folder: Path, num_faults: int, command: Sequence[str]) -> Report:
    """Run the coordinator until it ends by itself, and compare with an undisturbed run."""
    faulty = folder / "faulty"
    faulty.mkdir()
    tag = uuid.uuid4().hex
    around = Surroundings(tag)
    codes = [_KILLED]
    # start the coordinator until it is not killed
    while codes[-1] == _KILLED:
        with (folder / "output").open("a") as file:
            ended = subprocess.run([*command, "--part", str(faulty)], env={**os.environ, TAG: tag},
                                   stdout=file, stderr=file, check=False)
        codes.append(ended.returncode)
    load = os.getloadavg()[0]
    # from the first job, with the restarts of the coordinator
    seconds = (faulty / "ledger.jsonl").stat().st_mtime - float((faulty / "began").read_text())
    run = RecordedRun(faulty, config_of(plan))
    events = [event for event in read_events(run.files.events) if event["event"] == "outer_iteration"]
    ends = [0.0, *(event["elapsed_s"] for event in events)]
    report = Report(plan, faults_of(faulty, events), efficiency_of(events), len(codes) - 2, seconds,
                    statistics.median(b - a for a, b in itertools.pairwise(ends)), load)
    if codes[-1] != _INTERRUPTED:
        report.problems.append(f"the run ended with {codes[-1]}: {(folder / 'output').read_text()[-2000:]}")
    report.problems += audit(run.ledger_path) + around.problems(faulty) + judge.not_counted(run.ledger_path)
    if [event["outer_iter"] for event in events] != list(range(len(events))):
        report.problems.append("events.jsonl does not have each outer iteration once")
    whole = soak.undisturbed(run.config, folder / "whole", len(events))
    report.problems += judge.same_models(judge.committed_models(run.folder), judge.committed_models(whole.folder))
    return report


def faults_of(folder: Path, events: Sequence[dict[str, Any]]) -> list[Fault]:
    """The faults of a run with their consequences."""
    lines = list(read_json_lines(folder / "faults.jsonl"))
    by_number = {event["outer_iter"]: event for event in events}
    firsts = sorted(path.stat().st_mtime for path in folder.glob("first-*"))
    readies = [line["all_ready"] for line in lines if "all_ready" in line]
    found = [Fault(**line) for line in lines if "kind" in line]
    for fault in found:
        fault.all_ready_s = min((at - fault.at for at in readies if at > fault.at), default=math.nan)
        if fault.kind == COORDINATOR:
            fault.recovery_s = min((at - fault.at for at in firsts if at > fault.at), default=math.nan)
        elif fault.lost is not None:
            outer_iter, job, attempt = fault.lost
            with contextlib.suppress(FileNotFoundError):
                fault.recovery_s = mark_of(folder, outer_iter, job, attempt + 1).stat().st_mtime - fault.at
        following = by_number.get(fault.outer_iter + 1)
        if following:
            fault.num_counted = following["num_accepted"]
            fault.num_contributors = len({job["worker"] for job in following["jobs"] if job["accepted"]})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=32, help="worker processes")
    parser.add_argument("--minutes", type=float, default=30.0, help="duration")
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--job-s", type=float, default=1.0, help="seconds of a job")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", type=Path, help="file for the figures of each fault")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    plan = soak.Plan(num_workers=asked.workers, faulty_s=60 * asked.minutes, quiet_s=_REST_S, job_s=asked.job_s, seed=asked.seed)
    num_faults = math.ceil(asked.faults_per_hour * asked.minutes / 60)
    if asked.part:
        return coordinate(plan, asked.part, num_faults)
    with tempfile.TemporaryDirectory() as folder:
        report = storm_of(plan, Path(folder), num_faults, [sys.executable, "-c", _COORDINATE, *sys.argv[1:]])
    print(report)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(one) for one in report.faults], indent=1))
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
