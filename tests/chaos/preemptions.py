"""Preemption storm: 8 workers, each preempted every 90 s on average, with a notice of 2 s.

    python -m tests.chaos.preemptions [--workers 8] [--minutes 20] [--job-s 10] [--snapshots auto]

Workers mostly sleep, as in the soak test, so that each stands for a separate machine. A notice is
SIGTERM; a worker that still runs after the time of the notice is sent SIGKILL. The program reports

- the trained samples that count: samples of averaged jobs / samples of all minibatches of their
  outer iterations, those of lost attempts included;
- the objective of the final model on the validation data, compared with undisturbed runs of several
  seeds and the same number of outer iterations.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ngsgd.config import OptimizerConfig, RunConfig
from ngsgd.training.job import Job, JobResult
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.event_log import read_events
from ngsgd.training.task import Batch
from ngsgd.training.worker import Place, never, np_empty
from tests.chaos import soak
from tests.chaos.invariants import Surroundings
from tests.chaos.recorded import RecordedRun
from tests.chaos.steady import SteadyWorker
from tests.toy import Run

NOTICE_S, BETWEEN_S = 2.0, 90.0
# samples of a job of tests.toy, and of a minibatch: the next one ends within the notice
_JOB, _MINIBATCH = 300, 4
_SEEDS = (0, 1, 2, 3, 4)
_STEP_S = 0.02


class CountingWorker(SteadyWorker):
    """Writes a line per minibatch: its outer iteration and its samples."""

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        self._outer_iter = job.outer_iter
        return super().run(job, place, should_stop)

    def _train(self, *arguments: Any) -> None:
        super()._train(*arguments)
        batch: Batch = arguments[1]
        with (self.folder / f"trained-{os.getpid()}").open("a") as file:
            file.write(f"{self._outer_iter} {batch.num_examples}\n")


def trained_in(folder: Path) -> Counter[int]:
    """Samples of each outer iteration."""
    found: Counter[int] = Counter()
    for path in folder.glob("trained-*"):
        for line in path.read_text().splitlines():
            outer_iter, num_examples = map(int, line.split())
            found[outer_iter] += num_examples
    return found


@dataclass
class Preemptions(soak.Trouble):
    """Preempts workers."""

    num_notices: int = 0
    num_killed: int = 0

    def requested(self) -> bool:
        return time.monotonic() - self.began > self.plan.faulty_s

    def go_on(self) -> None:
        chance = random.Random(self.plan.seed)
        due = [time.monotonic() + chance.expovariate(1.0 / BETWEEN_S) for _ in range(self.plan.num_workers)]
        kills: list[tuple[float, int]] = []
        while not self.over.wait(_STEP_S) and not self.requested():
            now = time.monotonic()
            for worker, at in enumerate(due):
                if now >= at:
                    due[worker] = now + chance.expovariate(1.0 / BETWEEN_S)
                    process_id = self.pool.process_ids()[worker]
                    if self._signal(process_id, signal.SIGTERM):
                        self.num_notices += 1
                        kills.append((now + NOTICE_S, process_id))
            for one in [one for one in kills if now >= one[0]]:
                kills.remove(one)
                self.num_killed += self._signal(one[1], signal.SIGKILL)

    def _signal(self, process_id: int, number: signal.Signals) -> bool:
        """Send a signal; return whether the process still runs."""
        with contextlib.suppress(OSError):
            is_running = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
            if is_running:
                os.kill(process_id, number)
            return is_running
        return False


def config_of(plan: soak.Plan, snapshots: str) -> RunConfig:
    """Small minibatches of plain SGD, because all workers share few processors."""
    base = soak.config_of(plan)
    return replace(base, optimizer=OptimizerConfig("sgd"), schedule=replace(base.schedule, minibatch_size=_MINIBATCH),
                   # a minibatch has four samples instead of 64
                   failure=replace(base.failure, hang_timeout_s=20.0, snapshots=snapshots))  # type: ignore[arg-type]


def objf_of(run: Run) -> float:
    """Objective of the newest model on the validation data."""
    newest, _ = run.store.latest()
    assert newest is not None
    run.store.layout.load(run.model, newest.parameters)
    return run.spec.task().evaluate(run.model).valid.objf


def storm(plan: soak.Plan, snapshots: str, folder: Path) -> list[str]:
    """Run it, print the figures and return the problems."""
    settings, around = config_of(plan, snapshots), Surroundings()
    faulty = folder / "faulty"
    faulty.mkdir()
    run = RecordedRun(faulty, settings)
    how = partial(CountingWorker, folder=faulty, minibatch_s=plan.job_s * _MINIBATCH / _JOB)
    preemptions = Preemptions(plan, soak.pool_of(plan, run, how), faulty)
    preemptions.train(run)
    problems = audit(run.ledger_path) + around.problems(faulty)
    events = [event for event in read_events(run.files.events) if event["event"] == "outer_iteration"]
    counted = sum(job["num_frames"] for event in events for job in event["jobs"] if job["accepted"])
    finished = {event["outer_iter"] for event in events}
    trained = sum(number for outer_iter, number in trained_in(faulty).items() if outer_iter in finished)
    objf = objf_of(run)
    others = [soak.undisturbed(replace(settings, seed=seed), folder / str(seed), len(events))
              for seed in _SEEDS]
    objfs = [objf_of(other) for other in others]
    is_same = objf == objfs[0]
    print(f"preemptions             {preemptions.num_notices} in {plan.faulty_s:.0f} s, {preemptions.num_killed} killed after "
          f"the notice of {NOTICE_S:.0f} s")
    print(f"outer iterations        {len(events)} with {plan.num_workers} jobs of {plan.job_s:.0f} s")
    print(f"trained samples counted {counted} of {trained} ({counted / trained:.2%})")
    print(f"objective               {objf:.4f}{', that of the undisturbed run' if is_same else ''}; undisturbed, "
          f"{len(objfs)} seeds: {statistics.fmean(objfs):.4f} ({min(objfs):.4f} to {max(objfs):.4f})")
    if counted < 0.97 * trained:
        problems.append("less than 97 % of the trained samples count")
    if not min(objfs) <= objf <= max(objfs):
        problems.append("the objective is outside the range of the undisturbed runs")
    print("problems                " + ("\n  ".join(["", *problems]) if problems
                                         else "none: ledger consistent, nothing left behind"))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.preemptions", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=8, help="worker processes")
    parser.add_argument("--minutes", type=float, default=20.0, help="duration")
    parser.add_argument("--job-s", type=float, default=10.0, help="seconds of a job")
    parser.add_argument("--snapshots", choices=("auto", "off"), default="auto",
                        help="off: a preempted worker returns a partial result")
    parser.add_argument("--seed", type=int, default=0, help="of the preemptions")
    asked = parser.parse_args()
    plan = soak.Plan(num_workers=asked.workers, faulty_s=60 * asked.minutes, quiet_s=0.0, job_s=asked.job_s, seed=asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        return bool(storm(plan, asked.snapshots, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
