"""Repetition of jobs of a finished or stopped run, and comparison with the counted results."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from ngsgd.errors import AuditError, CheckpointError, ConfigError
from ngsgd.interface import option
from ngsgd.training.auditing.comparison import SMALLEST_OBJECTIVE, TOLERANCE
from ngsgd.training.job import Job, JobResult
from ngsgd.training.verification.counted import CountedJob, Starts
from ngsgd.training.worker_pool import WorkerPool

Outcome = Literal["identical", "close", "differs", "not reproducible", "failed"]


@dataclass(frozen=True)
class Sample:
    """The number of jobs to repeat: a fraction of all counted jobs, or a count."""

    fraction: float = 0.0
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Parse "5%" or "20".

        Raises:
            ConfigError: the text is neither, or not positive.
        """
        is_fraction = text.endswith("%")
        try:
            number = float(text[:-1]) / 100.0 if is_fraction else int(text)
        except ValueError:
            number = 0
        if not 0 < number < math.inf or (is_fraction and number > 1):
            raise ConfigError(f"{option('sample', '')} is {text}; give a percentage up to 100, such as 5%, or a number of jobs, "
                              "such as 20.")
        return cls(fraction=float(number)) if is_fraction else cls(count=int(number))

    def of(self, jobs: Sequence[CountedJob], num_counted: int, seed: int) -> list[CountedJob]:
        """Choose from the jobs that can be repeated; the fraction refers to all counted jobs."""
        wanted = self.count or math.ceil(self.fraction * num_counted)
        chosen = random.Random(seed).sample(range(len(jobs)), min(wanted, len(jobs)))
        return [jobs[index] for index in sorted(chosen)]


@dataclass(frozen=True)
class Check:
    """A repeated job."""

    job: CountedJob
    outcome: Outcome
    # relative difference of the objective, where bits may differ
    distance: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of `ngsgd verify`."""

    num_counted: int
    num_repeatable: int
    # differences of the numeric fingerprints; empty: compared bitwise
    differences: tuple[str, ...]
    checks: tuple[Check, ...]

    def count(self, outcome: Outcome) -> int:
        return sum(check.outcome == outcome for check in self.checks)

    def require_equal(self) -> None:
        """Raise if a job differs.

        Raises:
            AuditError: with the workers that gave other results.
        """
        if self.count("not reproducible"):
            one = next(check.job for check in self.checks if check.outcome == "not reproducible")
            raise AuditError(f"{_place(one)} gives another result each time on this machine, so nothing can be verified here; use "
                             "random numbers of the job's seed only, or check this machine (ngsgd doctor), and repeat.")
        wrong, checked = (Counter(check.job.worker for check in self.checks if not only or check.outcome == "differs")
                          for only in (True, False))
        if not wrong:
            return
        first = next(check.job for check in self.checks if check.outcome == "differs")
        counts = ", ".join(f"worker {worker} in {wrong[worker]} of {checked[worker]} jobs" for worker in sorted(wrong))
        all_differ = len(checked) > 1 and wrong == checked
        suspect = ("all workers differ, so this machine, its settings or the data have changed: repeat on another machine"
                   if all_differ else "check the machines of these workers, repeat on another machine, and train again from a "
                                      "model before the first difference")
        how = ("by more than rounding explains" if self.differences
               else "and this machine repeated each of them twice with the same result")
        raise AuditError(f"results that the run counted differ from those of this machine, {how}: {counts}; the first is "
                         f"{_place(first)}; {suspect}.")


def verify(jobs: Sequence[CountedJob], starts: Starts, pool: WorkerPool, objectives: Mapping[tuple[int, int], float], *,
           is_bitwise: bool, report: Callable[[Check], object]) -> list[Check]:
    """Repeat jobs and compare them.

    Args:
        jobs: the sample.
        starts: initial states of the jobs.
        pool: a started pool with one worker.
        objectives: (outer iteration, job) -> objective per frame that the run recorded.
        is_bitwise: compare bits; otherwise the objectives, with a tolerance.
        report: receives each check.
    """
    found: list[Check] = []
    for outer_iter, group in groupby(jobs, key=lambda one: one.outer_iter):
        wanted = list(group)
        try:
            for check in _check_all(outer_iter, wanted, starts, pool, objectives, is_bitwise=is_bitwise):
                found.append(check)
                report(check)
        except CheckpointError as error:
            failed = [Check(one, "failed", reason=str(error)) for one in wanted]
            found += failed
            for check in failed:
                report(check)
    return found


def _check_all(outer_iter: int, wanted: Sequence[CountedJob], starts: Starts, pool: WorkerPool,
               objectives: Mapping[tuple[int, int], float], *, is_bitwise: bool) -> Iterator[Check]:
    for one, job in starts.jobs(outer_iter, wanted, pool):
        result = _run(job, pool)
        if is_bitwise:
            yield _compared(one, job, result, pool)
            continue
        recorded = objectives.get((one.outer_iter, one.job))
        if recorded is None:
            yield Check(one, "failed", reason="events.jsonl holds no record of it")
            continue
        distance = abs(result.objf - recorded) / max(abs(recorded), SMALLEST_OBJECTIVE)
        yield Check(one, "close" if distance <= TOLERANCE else "differs", distance)


def _compared(one: CountedJob, job: Job, result: JobResult, pool: WorkerPool) -> Check:
    if f"{result.digest:016x}" == one.digest:
        return Check(one, "identical")
    again = _run(replace(job, attempt=job.attempt + 1), pool)
    return Check(one, "differs" if again.digest == result.digest else "not reproducible")


def _run(job: Job, pool: WorkerPool) -> JobResult:
    pool.submit(job)
    outcome = pool.wait(0.0)
    while outcome is None:
        outcome = pool.wait(1.0)
    if isinstance(outcome, JobResult):
        pool.release(outcome.sent)
        return outcome
    if outcome.error:
        raise outcome.error
    raise AuditError(f"job {job.job} of outer iteration {job.outer_iter + 1} could not be repeated ({outcome.reason}); check the "
                     "data and this machine, and repeat.")


def _place(one: CountedJob) -> str:
    return f"job {one.job} of outer iteration {one.outer_iter + 1}"
