"""Seeds: draw, run, check, replay and shrink trials."""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ngsgd.cluster.newborn import die_with_parent
from tests.simulation import checks
from tests.simulation.disk import SimulatedDisk
from tests.simulation.scenario import Scenario, draw_exchange, draw_faults, draw_faulty_worker, draw_lasting, draw_rare, draw_sites
from tests.simulation.stored import StoredTrial
from tests.simulation.trial import Trial
from tests.simulation.world import Fault

# seeds per trial of a run in object storage
_STORED_EVERY = 3
# trials that shrinking may cost
_MAX_SHRINK = 100
# and seconds, after which the smallest failure so far is reported
_MAX_SHRINK_S = 30.0


@dataclass(frozen=True)
class Verdict:
    """The result of one seed."""

    seed: int
    # all faults of the seed, and the numbers of those that were applied
    faults: tuple[Fault, ...]
    kept: tuple[int, ...]
    problems: tuple[str, ...]
    # digest of all events
    trace: str
    # settings that the seed drew, for people
    setting: str = ""
    num_occurred: int = 0
    num_processes: int = 0
    # audits of jobs with a verdict
    num_audited: int = 0
    audits_all: bool = False
    # (fault, phase) that occurred together
    covered: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = field(default=(), repr=False)

    def replay(self) -> str:
        """The arguments of `python -m tests.simulation` that repeat the trial."""
        only = "" if len(self.kept) == len(self.faults) else f" --only-faults {','.join(map(str, self.kept)) or 'none'}"
        every = " --audit-all" if self.audits_all else ""
        return f"--seed {self.seed}{only}{every}"


class Simulator:
    """Runs seeds in this process."""

    def __init__(self, disk: SimulatedDisk, *, audits_all: bool = False) -> None:
        self._disk = disk
        # every job of every seed is audited, and runs are longer
        self._audits_all = audits_all

    def run(self, seed: int, kept: Sequence[int] | None = None, *, with_lines: bool = False) -> Verdict:
        """Run one seed, with all its faults or those with the given numbers."""
        with self._disk.installed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = self._run(seed, kept, with_lines=with_lines)
        if seed % _STORED_EVERY:
            return verdict
        found = StoredTrial(seed, Path(f"{self._disk.root}-stored")).run()
        return replace(verdict, problems=(*verdict.problems, *(f"object storage: {problem}" for problem in found)))

    def _run(self, seed: int, kept: Sequence[int] | None, *, with_lines: bool) -> Verdict:
        chance = random.Random(seed)
        scenario = Scenario.of(chance)
        if self._audits_all:
            scenario = scenario.fully_audited()
        # separate, so that other seeds keep their settings and faults
        scenario = scenario.compressed(random.Random(f"delta {seed}"))
        scenario = scenario.with_sites(random.Random(f"sites {seed}"))
        scenario = scenario.with_workers(random.Random(f"workers {seed}"))
        scenario = scenario.with_snapshots(random.Random(f"snapshots {seed}"))
        scenario = scenario.with_exchange(random.Random(f"collective {seed}"))
        scenario = scenario.with_bad_examples(random.Random(f"examples {seed}"))
        baseline = Trial(self._disk, scenario, ())
        baseline.run()
        # the next trial has the same folder
        found = [f"without faults: {problem}" for problem in checks.problems(baseline)]
        num_audited = checks.num_audited(baseline)
        faults = draw_faults(chance, baseline.world.counts, scenario)
        # separate, too
        chance = random.Random(f"audit {seed}")
        if not self._audits_all:
            scenario = scenario.audited(chance)
        faults += draw_faulty_worker(chance, scenario)
        faults += draw_rare(random.Random(f"rare {seed}"), baseline.world.phases, baseline.world.counts, scenario)
        faults += draw_lasting(random.Random(f"lasting {seed}"), baseline.world.counts, scenario)
        faults += draw_exchange(random.Random(f"exchange {seed}"), baseline.world.counts, scenario)
        faults += draw_sites(random.Random(f"rounds {seed}"), baseline.world.counts, scenario)
        numbers = range(len(faults)) if kept is None else [number for number in kept if number < len(faults)]
        lines: list[str] | None = [] if with_lines else None
        trial = Trial(self._disk, scenario, tuple(faults[number] for number in numbers), lines)
        trial.run()
        return Verdict(seed, tuple(faults), tuple(numbers), (*found, *checks.problems(trial)),
                       trial.world.trace(), setting_of(scenario), len(trial.world.occurred), len(trial.lives),
                       num_audited + checks.num_audited(trial), self._audits_all, tuple(sorted(trial.world.covered)),
                       tuple(lines or ()))

    def shrink(self, verdict: Verdict) -> Verdict:
        """Return the trial with the fewest faults that still has a problem."""
        best, budget, began = verdict, _MAX_SHRINK, time.perf_counter()
        size = max(1, len(best.kept) // 2)
        while size and budget > 0:
            smaller = False
            for first in range(0, len(best.kept), size):
                kept = (*best.kept[:first], *best.kept[first + size:])
                budget -= 1
                found = self.run(verdict.seed, kept)
                if kind_of(found) == kind_of(verdict):
                    best, smaller = found, True
                    break
                if time.perf_counter() - began > _MAX_SHRINK_S:
                    return best
            if not smaller:
                size //= 2
        return best


def kind_of(verdict: Verdict) -> str:
    """The first problem without its numbers; empty if there is none."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "N", verdict.problems[0]) if verdict.problems else ""


def setting_of(scenario: Scenario) -> str:
    """The drawn settings in one line."""
    settings = scenario.settings
    outer = " ".join(f"{name}={value}" for name, value in settings["outer"].items())
    failure = settings["failure"]
    return (f"outer {outer}; policy={failure['policy']} max_attempts={failure['max_attempts']}; "
            f"audit_every={failure['audit_every']}; "
            f"{settings['cluster']['num_workers']} workers, {settings['schedule']['num_jobs_final']} jobs, "
            f"{scenario.num_archives * scenario.shards_per_archive} shards")


@contextmanager
def simulator(*, audits_all: bool = False) -> Iterator[Simulator]:
    """Provide a simulator, with its disk in memory where there is one."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="ngsgd-faults-", dir=memory if os.access(memory, os.W_OK) else None))
    torch.set_num_threads(1)
    disk = SimulatedDisk(folder / "disk")
    # collecting the modules of torch takes longer than a trial
    gc.collect()
    gc.freeze()
    try:
        yield Simulator(disk, audits_all=audits_all)
    finally:
        gc.unfreeze()
        shutil.rmtree(folder, ignore_errors=True)


def run_seeds(first: int, count: int | None, seconds: float | None, step: int = 1, *,
              audits_all: bool = False, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[Verdict]:
    """Run seeds until a number or a time is over, or a stop is requested; shrink failed ones."""
    began, seed = time.perf_counter(), first
    with simulator(audits_all=audits_all) as one:
        while (not is_stopped() and (count is None or seed < first + count * step)
               and (seconds is None or time.perf_counter() - began < seconds)):
            verdict = one.run(seed)
            yield one.shrink(verdict) if verdict.problems else verdict
            seed += step


def share_of_seeds(options: argparse.Namespace, number: int, count: int | None, parent: int, results: Any,
                   stopped: Any) -> None:
    """Run every `options.processes`-th seed in a process of `python -m tests.simulation`."""
    die_with_parent(parent)
    for verdict in run_seeds(options.first_seed + number, count, options.seconds, options.processes,
                             audits_all=options.audit_all, is_stopped=stopped.is_set):
        results.put(verdict)
