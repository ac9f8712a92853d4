"""Storm: 32 worker processes, 1-second jobs, 125 faults an hour at random times.

    python -m tests.chaos.storm [--workers 32] [--minutes 30] [--faults-per-hour 125]

Workers mostly sleep, as in the soak test, so that each stands for a separate machine. The program
reports for each fault

- the recovery: seconds from the fault until a worker trains the lost shard again;
- the replacement: seconds from the fault until all workers are ready again;
- the participation in the next outer iteration: counted contributions, and workers among them.

At the end the ledger is audited, the model is compared with that of a run without faults, and
nothing may be left behind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.errors import NgsgdError, RunInterrupted
from ngsgd.files import read_json_lines
from ngsgd.launcher.timeline.efficiency import Efficiency, efficiency_of
from ngsgd.training.job import Job, JobResult
from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.storage.audit import audit
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty
from tests.chaos import soak
from tests.chaos.invariants import Surroundings, final_hash

_STEP_S = 0.002
# after the last fault, for the recovery
_REST_S = 15.0


@dataclass(frozen=True)
class Retries:
    """Makes workers of the soak test that leave a file when they begin to repeat a job."""

    steady: soak.Steady

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        return _RetryWorker(spec, index, self.steady)


class _RetryWorker(soak.SteadyWorker):
    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        if job.attempt > 1:
            mark_of(self.how.folder, *job.identity).touch()
        return super().run(job, place, should_stop)


def mark_of(folder: str, outer_iter: int, job: int, attempt: int) -> Path:
    """The file that a worker creates when it begins to repeat a job."""
    return Path(folder) / f"retry-{outer_iter}-{job}-{attempt}"


@dataclass
class Fault:
    """A fault and its consequences; times are in seconds after it."""

    kind: str
    worker: int
    at: float                       # unix time
    # outer iteration, job, attempt; None if the worker was idle
    lost: tuple[int, int, int] | None
    outer_iter: int
    recovery_s: float = math.nan
    all_ready_s: float = math.nan
    # of the next outer iteration
    num_counted: int = 0
    num_contributors: int = 0


@dataclass
class Storm:
    """Injects faults in a thread and observes the pool; the stop signal of the run."""

    plan: soak.Plan
    pool: ProcessPool
    folder: Path
    num_faults: int
    faults: list[Fault] = field(default_factory=list)

    def start(self) -> None:
        self.began = time.monotonic()
        chance = random.Random(self.plan.seed)
        self._due = sorted(chance.uniform(0.0, self.plan.faulty_s) for _ in range(self.num_faults))
        self._chance = chance
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._inject, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._over.set()
        self._thread.join()

    def requested(self) -> bool:
        return time.monotonic() - self.began > self.plan.faulty_s + _REST_S

    def expired(self) -> bool:
        return False

    def _inject(self) -> None:
        was_short = False
        while not self._over.wait(_STEP_S):
            now = time.monotonic() - self.began
            if self._due and now >= self._due[0]:
                self._due.pop(0)
                self._strike()
                was_short = False
            # a death is noticed later; a fault that kills nobody never shows
            is_complete = self.pool.num_workers_alive() == self.plan.num_workers
            if is_complete and was_short:
                for fault in self.faults:
                    if math.isnan(fault.all_ready_s):
                        fault.all_ready_s = time.time() - fault.at
            was_short = not is_complete

    def _strike(self) -> None:
        kind, worker = self._chance.choice(soak.KINDS), self._chance.randrange(self.plan.num_workers)
        progress = self.pool.progress()
        lost = progress[worker][0] if worker in progress else None
        running = max((identity[0] for identity, _ in progress.values()), default=-1)
        self.faults.append(Fault(kind, worker, time.time(), lost, running))
        soak.strike(self.pool, self.folder, kind, worker)


@dataclass
class Report:
    """The outcome; `problems` is empty if no work was lost."""

    plan: soak.Plan
    faults: list[Fault]
    efficiency: Efficiency
    jobs_per_s: float
    median_s: float                 # duration of an outer iteration without a fault
    load: float
    problems: list[str]

    @property
    def recoveries(self) -> list[float]:
        return [one.recovery_s for one in self.faults if not math.isnan(one.recovery_s)]

    @property
    def replacements(self) -> list[float]:
        return [one.all_ready_s for one in self.faults if not math.isnan(one.all_ready_s) and one.kind != "exception"]

    def __str__(self) -> str:
        num = self.plan.num_workers
        kinds = Counter(one.kind for one in self.faults)
        lowest = min(((one.num_counted, one.num_contributors) for one in self.faults if one.num_counted), default=(0, 0))
        full = sum(one.num_counted == num for one in self.faults)
        own = sum(one.num_contributors == num for one in self.faults)
        kept = self.jobs_per_s * self.median_s / num
        return "\n".join([
            f"faults                    {len(self.faults)}: {', '.join(f'{n} x {kind}' for kind, n in kinds.most_common())}",
            f"contributions             {self.efficiency.num_counted} of {self.efficiency.num_possible} counted "
            f"({self.efficiency.participation:.2%})",
            f"next outer iteration      {full} of {len(self.faults)} with {num}/{num} contributions, {own} from {num} workers; "
            f"lowest {lowest[0]} from {lowest[1]} workers",
            f"recovery, s               {_spread(self.recoveries)}",
            f"all workers ready, s      {_spread(self.replacements)}",
            f"throughput                {kept:.1%} of that of the median outer iteration ({self.median_s:.3f} s)",
            f"effective training time   {self.efficiency.effective_share:.1%}",
            f"load                      {self.load:.1f}",
            "problems                  " + ("none: ledger consistent, model bitwise identical, nothing left behind"
                                            if not self.problems else "\n  ".join(["", *self.problems]))])


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "none"
    ordered = sorted(values)
    tenth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"median {statistics.median(values):.3f}, 90 % below {tenth:.3f}, most {ordered[-1]:.3f} ({len(values)} faults)"


class _Records(soak.Times):
    """All records of outer iterations."""

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        super().outer_iteration(record)
        self.records.append(record)


def storm(plan: soak.Plan, folder: Path, num_faults: int) -> Report:
    """Run it, and the same number of outer iterations without faults and without sleep."""
    around, found = Surroundings(), []
    run, _ = soak.make_run(plan, folder / "faulty")
    records = _Records()
    run.recorder = records
    pool = ProcessPool(run.spec, plan.num_workers, 1, run.store.layout.size, log_directory=run.folder / "workers",
                       make_worker=Retries(soak.steady_of(plan, run.folder)))
    weather, begin = Storm(plan, pool, run.folder, num_faults), pool.start

    def start() -> None:
        begin()
        weather.start()
    pool.start = start  # type: ignore[method-assign]
    try:
        run.train(pool, weather)
    except RunInterrupted:   # as it should: there is more data than time
        pass
    except NgsgdError as error:
        found.append(f"the run ended: {error}")
    weather.join()
    load = os.getloadavg()[0]
    found += audit(run.ledger_path) + around.problems(run.folder)
    found += soak.losses(read_json_lines(run.ledger_path))
    _complete(weather.faults, records.records, run.folder)
    if final_hash(run) != soak.hash_without_faults(plan, folder / "whole", len(records.commits)):
        found.append("the final model is not that of the run without faults")
    efficiency = efficiency_of([{"event": "outer_iteration", **asdict(one)} for one in records.records])
    return Report(plan, weather.faults, efficiency, *_speeds(records), load, found)


def _complete(faults: Sequence[Fault], records: Sequence[OuterIterationRecord], folder: Path) -> None:
    """Add the recovery and the next outer iteration to each fault."""
    by_number = {one.outer_iter: one for one in records}
    for fault in faults:
        if fault.lost is not None:
            outer_iter, job, attempt = fault.lost
            mark = mark_of(str(folder), outer_iter, job, attempt + 1)
            fault.recovery_s = mark.stat().st_mtime - fault.at if mark.exists() else math.nan
        later = by_number.get(fault.outer_iter + 1)
        if later:
            fault.num_counted = later.num_accepted
            fault.num_contributors = len({job.worker for job in later.jobs if job.accepted})


def _speeds(records: _Records) -> tuple[float, float]:
    """Jobs averaged per second, and the median duration of an outer iteration."""
    times = [at for at, _ in records.commits]
    num_jobs = sum(number for _, number in records.commits[1:])
    return num_jobs / (times[-1] - times[0]), statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=32, help="worker processes")
    parser.add_argument("--minutes", type=float, default=30.0, help="duration")
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--job-s", type=float, default=1.0, help="seconds of a job")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", type=Path, help="file for the figures of each fault")
    asked = parser.parse_args()
    plan = soak.Plan(num_workers=asked.workers, faulty_s=60 * asked.minutes, quiet_s=_REST_S, job_s=asked.job_s, seed=asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        report = storm(plan, Path(folder), math.ceil(asked.faults_per_hour * asked.minutes / 60))
    print(report)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(one) for one in report.faults], indent=1))
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
