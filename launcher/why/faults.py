"""Faults that a run recorded: failed jobs, rejected results, incidents, killed processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ngsgd.counting import counted
from ngsgd.errors import FailureKind
from ngsgd.launcher.why import causes
from ngsgd.launcher.why.causes import INTERRUPTED, LOST_WORK, REPLACED, RETRIED, Cause, of_error, of_worker
from ngsgd.launcher.why.facts import IN_LEDGER, Evidence, Line, failures_of, quoted


@dataclass(frozen=True)
class Fault:
    """One fault and its evidence."""

    severity: int
    cause: Cause
    evidence: tuple[Evidence, ...]
    workers: tuple[int, ...] = ()
    # FailureKind of its last line
    kind: str = ""


def bad_examples(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Examples with a non-finite loss or gradient -> reason and number of times."""
    found: dict[str, list[str]] = {}
    for event in events:
        jobs = event.get("jobs") if event.get("event") == "outer_iteration" else None
        for job in jobs if isinstance(jobs, list) else ():
            for name, reason in (job.get("bad_examples") or {}).items():
                found.setdefault(name, []).append(str(reason))
    return {name: f"{reasons[-1]}, {counted(len(reasons), 'time')}" if len(reasons) > 1 else reasons[-1]
            for name, reasons in sorted(found.items())}


def faults_of(events: Sequence[Line], ledger: Sequence[Line], *, is_alive: bool) -> list[Fault]:
    """All faults of a run: of jobs in the order of the ledger, then in the order of the events."""
    return [*map(_of_job, failures_of(ledger)), *_of_results(ledger), *_of_incidents(events),
            *_of_processes(events, is_alive=is_alive)]


def wait_of(events: Sequence[Line], ledger: Sequence[Line]) -> str:
    """What a run that trains waits for after its faults; empty if it waits for nothing."""
    if events and events[-1].event == "opened":
        return "the run was resumed; it starts its workers, or trains its first outer iteration"
    committed = max((line.job[0] for line in ledger if line.event == "committed"), default=-1)
    last, failed = ledger[-1:], [lines[-1] for lines in failures_of(ledger) if lines[-1].event == "failed"]
    # a job is submitted when a worker takes it; a plan may also be made ahead of the results
    if last and (last[0].event == "failed" or (last[0].event == "planned" and last[0].job[0] <= committed + 1)):
        return f"the run waits for a worker for outer iteration {last[0].job[0] + 1}"
    return f"a worker repeats job {failed[-1].job[1]} of outer iteration {failed[-1].job[0] + 1}" if failed else ""


def _of_job(lines: Sequence[Line]) -> Fault:
    attempts = [line for line in lines if line.event == "failed"]
    severity, cause = _judged(attempts, lines[-1])
    workers = tuple(line.worker for line in attempts if line.worker >= 0)
    return Fault(severity, cause, tuple(map(quoted, lines)), workers, attempts[-1].kind)


def _judged(attempts: Sequence[Line], last: Line) -> tuple[int, Cause]:
    cause, end = of_worker(attempts[-1].kind), last.event
    if end == "accepted":
        # a job is a deterministic function of its inputs: a retry that succeeded had the same data
        domain = causes.UNKNOWN if cause.domain == causes.WORKLOAD else cause.domain
        return RETRIED, replace(cause, domain=domain, outlook=causes.MAY_HELP)
    if end == "quarantined":
        return LOST_WORK, causes.ARCHIVE if last.kind == FailureKind.DAMAGED_ARCHIVE else causes.CRASHING
    if end == "dropped" and len(attempts) > 1:
        return LOST_WORK, replace(cause, outlook=causes.CANNOT_HELP)
    return LOST_WORK if end in ("dropped", "rejected") else RETRIED, cause


def _of_results(ledger: Sequence[Line]) -> Iterator[Fault]:
    failed = {(*line.job, line.fields.get("attempt")) for line in ledger if line.event == "failed"}
    for line in ledger:
        workers = (line.worker,) if line.worker >= 0 else ()
        if line.event == "rejected":
            yield Fault(LOST_WORK, causes.REJECTED, (quoted(line),), workers)
        elif line.event == "discarded" and (*line.job, line.fields.get("attempt")) not in failed:
            yield Fault(REPLACED, of_worker(FailureKind.DAMAGED_RESULT), (quoted(line),), workers)


def _of_incidents(events: Sequence[Line]) -> Iterator[Fault]:
    for line in events:
        what = str(line.fields.get("what"))
        if line.event != "incident" or what in IN_LEDGER:
            continue
        workers = (line.worker,) if line.worker >= 0 else ()
        if what == "worker_replaced":
            # it had no job, so a replacement is all that was needed
            cause = replace(of_worker(line.kind), outlook=causes.MAY_HELP)
            if cause.domain == causes.WORKLOAD:
                cause = replace(cause, domain=causes.UNKNOWN)
            yield Fault(REPLACED, cause, (quoted(line),), workers, line.kind)
        elif what in causes.INCIDENTS:
            severity, cause = causes.INCIDENTS[what]
            yield Fault(severity, cause, (quoted(line),), workers, line.kind)


def _of_processes(events: Sequence[Line], *, is_alive: bool) -> Iterator[Fault]:
    opened: Line | None = None
    for line in events:
        if line.event == "opened":
            if opened is not None:
                yield Fault(INTERRUPTED, causes.KILLED, (_unclosed(opened),))
            opened = line
        elif line.event == "error":
            yield Fault(INTERRUPTED, of_error(line.fields), (quoted(line),))
        elif line.event == "closed":
            opened = None
    if opened is not None and not is_alive:
        yield Fault(INTERRUPTED, causes.KILLED, (_unclosed(opened),))


def _unclosed(opened: Line) -> Evidence:
    return Evidence(opened.source, f"a process began here ({opened.fields.get('purpose')}), and no line reports its end")
