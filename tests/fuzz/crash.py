"""Crash points: the process dies, or the disk is full, before each change of a file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz import judge
from tests.fuzz.interposer import Arming, Mode
from tests.fuzz.judge import Expected
from tests.fuzz.report import Report, chosen
from tests.fuzz.stage import Stage
from tests.simulation.durability import Operation

_HOW = {"kill": Mode.KILL, "full": Mode.FAIL_REST, "eio": Mode.FAIL_ONE, "half": Mode.HALF}
_ERRORS = {"eio": errno.EIO}
HOW = tuple(_HOW)


@dataclass(frozen=True)
class Point:
    """Before operation `number` of a run that prepares its data itself."""

    how: str
    operation: Operation

    @property
    def name(self) -> str:
        return f"{self.how}-{self.operation.number:04d}"

    def arming(self, stage: Stage) -> Arming:
        error = _ERRORS.get(self.how, errno.ENOSPC)
        return Arming(stage.out, _HOW[self.how], self.operation.number, error)


def campaign(stage: Stage, how: str, num_cases: int | None, only: str | None) -> Report:
    """Breaks a run at many points and resumes it."""
    points = [Point(how, operation) for operation in stage.finish()]
    expected = Expected.of(stage.run)
    report = Report(f"crash ({how})", lambda case: f"python -m tests.fuzz crash --how {how} --only {case}")
    for point in chosen(points, num_cases, lambda point: point.name, only):
        where = f"before {point.operation.kind} of {stage.neutral(point.operation.path)}"
        report.add(point.name, _try(stage, point, expected, report), where)
    return report


def _try(stage: Stage, point: Point, expected: Expected, report: Report) -> Iterator[str]:
    stage.reset()
    broken = stage.train(point.arming(stage))
    if point.how == "kill":
        if broken.signal == 0:
            # the last calls of a run may come in another order; then there was nothing to kill
            report.notes["ended before the point"] += 1
    else:
        yield from judge.well_told(broken)
    yield from recover(stage, expected)


def recover(stage: Stage, expected: Expected, *, must_resume: bool = False) -> Iterator[str]:
    """Resume the run, or start another one if nothing was committed; return the problems."""
    if not stage.runs():
        yield from _new_run(stage, expected)
        return
    num_commits = len(judge.commits(stage.run))
    done = stage.call("resume")
    if done.code == 0:
        yield from judge.finished_run(stage.run, expected)
        return
    yield from judge.well_told(done)
    if len(done.sentences) > 1:
        yield f"resume printed {len(done.sentences)} sentences"
    if num_commits or must_resume:
        yield f"a run with commits cannot be resumed: {stage.neutral(done.err).strip()[:200]}"
    yield from _new_run(stage, expected)


def _new_run(stage: Stage, expected: Expected) -> Iterator[str]:
    before = set(stage.runs())
    done = stage.train()
    yield from (f"a new run: {problem}" for problem in judge.well_told(done, may_fail=False))
    if done.code == 0:
        (run,) = set(stage.runs()) - before
        yield from (f"a new run: {problem}" for problem in judge.finished_run(run, expected))
