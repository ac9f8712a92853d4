"""Soak test: a random fault every 20 to 30 s, and the remaining speed.

    python -m tests.chaos.soak [--workers 16] [--minutes 20]

Stretches with faults and stretches without take turns in one run, so that both see the same
machine. A worker's minibatches last as long on a busy machine as on an idle one: they mostly sleep,
so that each worker stands for a separate machine. Goodput is the number of jobs averaged per
second with faults over that without. At the end the ledger is audited, the model is compared with
that of a run without faults, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.cluster.worker_process import MakeWorker
from ngsgd.config import ClusterConfig, FailureConfig, RunConfig
from ngsgd.errors import NgsgdError, RunInterrupted
from ngsgd.files import read_json_lines
from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.storage.audit import audit
from tests import judge
from tests.chaos.invariants import Surroundings
from tests.chaos.steady import SteadyWorker
from tests.toy import Recorder, Run, config

KINDS = ("SIGKILL",) * 7 + ("SIGSTOP", "SIGTERM", "exception")   # kill -9 mostly
_NUM_MINIBATCHES = 5           # of a job


@dataclass(frozen=True)
class Plan:
    """How long, how many, how bad."""

    num_workers: int = 16
    faulty_s: float = 1200.0        # with faults, in all
    num_stretches: int = 8          # that this is divided into
    quiet_s: float = 320.0          # without, in all
    job_s: float = 0.5              # a fault costs about half a job, whatever the job's length
    between_faults_s: tuple[float, float] = (20.0, 30.0)
    hang_timeout_s: float = 3.0
    seed: int = 0


@dataclass
class Report:
    """The outcome of a soak test; `problems` is empty if it passed."""

    num_faults: Counter[str]
    jobs_per_s: dict[str, float]            # "faulty" and "quiet"
    ratios: list[float]                     # of each faulty stretch to the quiet ones around it
    num_outer_iters: int
    tried_again: Counter[str]               # jobs, by how the try before had ended
    problems: list[str]

    @property
    def goodput(self) -> float:
        return self.jobs_per_s["faulty"] / self.jobs_per_s["quiet"]

    def __str__(self) -> str:
        spread = f"{min(self.ratios):.1%} to {max(self.ratios):.1%} over {len(self.ratios)} stretches" if self.ratios else ""
        return "\n".join([
            f"faults                 {self.num_faults.total()}: {_listed(self.num_faults)}",
            f"outer iterations       {self.num_outer_iters}",
            f"jobs retried           {self.tried_again.total()}: {_listed(self.tried_again)}",
            f"jobs averaged per s    {self.jobs_per_s['faulty']:.3f} with faults, {self.jobs_per_s['quiet']:.3f} without",
            f"goodput                {self.goodput:.1%} ({spread})",
            "problems               " + ("none: ledger consistent, model bitwise identical, nothing left behind"
                                         if not self.problems else "\n  ".join(["", *self.problems]))])


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in counts.most_common())


@dataclass
class Trouble(ABC):
    """Injects faults in a thread of the coordinator, and ends the run when its time is over."""

    plan: Plan
    pool: ProcessPool
    folder: Path
    over: threading.Event = field(default_factory=threading.Event, kw_only=True)

    @abstractmethod
    def go_on(self) -> None:
        """Inject faults until `over` is set."""

    @abstractmethod
    def requested(self) -> bool:
        """Whether the time is over."""

    def expired(self) -> bool:
        return False

    def start(self) -> None:
        """Begin; the pool is complete."""
        self.began = time.monotonic()

    def train(self, run: Run) -> None:
        """Train until the time is over: there is more data than time."""
        begin, thread = self.pool.start, threading.Thread(target=self.go_on, daemon=True)

        def start() -> None:
            begin()
            self.start()
            thread.start()
        self.pool.start = start  # type: ignore[method-assign]
        try:
            with contextlib.suppress(RunInterrupted):
                run.train(self.pool, self)
        finally:
            self.over.set()
            if thread.ident:
                thread.join()


@dataclass
class BadLuck(Trouble):
    """Faults in stretches."""

    # kind, seconds since the beginning
    faults: list[tuple[str, float]] = field(default_factory=list)

    def stretch(self, at_s: float) -> tuple[int, bool]:
        """(number, whether it has faults) of a stretch; quiet ones come first and last."""
        quiet_s, faulty_s = self.plan.quiet_s / (self.plan.num_stretches + 1), self.plan.faulty_s / self.plan.num_stretches
        number, rest_s = divmod(at_s, quiet_s + faulty_s)
        return int(number), rest_s >= quiet_s

    def requested(self) -> bool:
        return time.monotonic() - self.began > self.plan.faulty_s + self.plan.quiet_s

    def go_on(self) -> None:
        chance = random.Random(self.plan.seed)
        due_s = chance.uniform(*self.plan.between_faults_s) / 2    # of time with faults
        spent_s, step_s = 0.0, 0.02
        while not self.over.wait(step_s):
            now_s = time.monotonic() - self.began
            spent_s += step_s * self.stretch(now_s)[1]
            if self.stretch(now_s)[1] and spent_s >= due_s and not self.requested():
                kind = chance.choice(KINDS)
                strike(self.pool, self.folder, kind, chance.randrange(self.plan.num_workers))
                self.faults.append((kind, now_s))
                due_s += chance.uniform(*self.plan.between_faults_s)


def strike(pool: ProcessPool, folder: Path, kind: str, index: int) -> None:
    """Inject a fault into a worker; a stopped one stays stopped until the pool kills it."""
    if kind == "exception":
        (folder / f"raise-{index}").touch()
        return
    process_id = pool.process_ids()[index]
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, getattr(signal, kind))


class Times(Recorder):
    """When each outer iteration was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[tuple[float, int]] = []   # on the monotonic clock, and the jobs averaged

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.commits.append((time.monotonic(), record.num_accepted))


class StopAfter:
    """Ends a run after so many outer iterations, counted in its folder; records come later."""

    def __init__(self, run: Run, num_outer_iters: int) -> None:
        self.newest = run.store.directory / f"iter-{num_outer_iters - 1:06d}"

    def requested(self) -> bool:
        return self.newest.exists()

    def expired(self) -> bool:
        return False


def soak(plan: Plan, folder: Path) -> Report:
    """Run it for `faulty_s` and `quiet_s`, and again without faults and without sleep."""
    around, times = Surroundings(), Times()
    (folder / "faulty").mkdir(parents=True)
    run = Run(folder / "faulty", config_of(plan))
    run.recorder = times
    luck = BadLuck(plan, pool_of(plan, run, steady(plan, run.folder)), run.folder)
    found = []
    try:
        luck.train(run)
    except NgsgdError as error:
        found.append(f"the run ended: {error}")
    found += audit(run.ledger_path) + around.problems(run.folder)
    found += judge.not_counted(run.ledger_path)
    whole = undisturbed(run.config, folder / "whole", len(times.commits))
    found += judge.same_models(judge.committed_models(run.folder), judge.committed_models(whole.folder))
    reasons = Counter(re.sub(r"^process \d+ ", "", line["reason"])
                      for line in read_json_lines(run.ledger_path) if line["event"] == "failed")
    kinds = Counter(kind for kind, _ in luck.faults)
    return Report(kinds, *_speeds(luck, times), len(times.commits), reasons, found)


def steady(plan: Plan, folder: Path, kind: type[SteadyWorker] = SteadyWorker) -> MakeWorker:
    """Makes workers whose jobs last as long as those of the plan."""
    return partial(kind, folder=folder, minibatch_s=plan.job_s / _NUM_MINIBATCHES)


def pool_of(plan: Plan, run: Run, make_worker: MakeWorker) -> ProcessPool:
    return ProcessPool(run.spec, plan.num_workers, 1, run.store.layout.size,
                       log_directory=run.folder / "workers", make_worker=make_worker)


def config_of(plan: Plan) -> RunConfig:
    """More outer iterations than there is time for."""
    plain = config()
    num_passes = 2 * plan.num_workers * (plan.faulty_s + plan.quiet_s) / plan.job_s
    schedule = replace(plain.schedule, num_jobs_initial=plan.num_workers, num_jobs_final=plan.num_workers,
                       num_epochs=num_passes / 12)   # tests.toy makes 12 passes an epoch
    return replace(plain, schedule=schedule, cluster=ClusterConfig(num_workers=plan.num_workers, threads_per_worker=1),
                   failure=FailureConfig(hang_timeout_s=plan.hang_timeout_s, max_attempts=20))


def undisturbed(settings: RunConfig, folder: Path, num_outer_iters: int) -> Run:
    """A run of as many outer iterations in one process, without sleep."""
    folder.mkdir()
    run = Run(folder, settings)
    with contextlib.suppress(RunInterrupted):
        run.train(run.in_process(), StopAfter(run, num_outer_iters))
    return run


def _speeds(luck: BadLuck, times: Times) -> tuple[dict[str, float], list[float]]:
    """Jobs averaged per second, with faults and without; the ratio of each stretch with faults."""
    seconds: dict[tuple[int, bool], float] = {}
    jobs: dict[tuple[int, bool], float] = {}
    before = luck.began
    # an outer iteration belongs to the stretch in which it began
    for at, num_jobs in times.commits:
        stretch = luck.stretch(before - luck.began)
        seconds[stretch] = seconds.get(stretch, 0.0) + at - before
        jobs[stretch] = jobs.get(stretch, 0.0) + num_jobs
        before = at

    def speed(chosen: list[tuple[int, bool]]) -> float:
        return sum(jobs[one] for one in chosen) / sum(seconds[one] for one in chosen)
    quiet = {number for number, is_faulty in jobs if not is_faulty}
    ratios = [speed([(number, True)]) / speed([(n, False) for n in (number, number + 1) if n in quiet])
              for number, is_faulty in sorted(jobs) if is_faulty]
    return {"faulty": speed([one for one in jobs if one[1]]), "quiet": speed([one for one in jobs if not one[1]])}, ratios


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=16, help="worker processes")
    parser.add_argument("--minutes", type=float, default=20.0, help="with faults; a quarter of that comes without")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", type=Path, help="file for the figures")
    asked = parser.parse_args()
    plan = Plan(num_workers=asked.workers, faulty_s=60 * asked.minutes, quiet_s=16 * asked.minutes, seed=asked.seed,
                num_stretches=max(1, round(asked.minutes / 2.5)))
    with tempfile.TemporaryDirectory() as folder:
        report = soak(plan, Path(folder))
    print(report)
    if asked.json:
        asked.json.write_text(json.dumps({"goodput": report.goodput, "ratios": report.ratios, "jobs_per_s": report.jobs_per_s,
                                          "faults": report.num_faults,
                                          "tried_again": report.tried_again, "problems": report.problems}, indent=1))
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
