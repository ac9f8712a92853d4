"""Faults that a run recorded, by severity: failed jobs, rejected results, incidents, killed
processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ngsgd.counting import counted
from ngsgd.errors import FailureKind
from ngsgd.launcher.why.causes import (
    CANNOT_HELP,
    INFRASTRUCTURE,
    KILLED,
    MAY_HELP,
    UNKNOWN,
    WORKLOAD,
    WRONG_MACHINE,
    Cause,
    of_error,
    of_worker,
)
from ngsgd.launcher.why.facts import IN_LEDGER, Evidence, JobFailures, Line, failures_of, quoted
from ngsgd.training.records import NOT_THE_BEST

# severities: a replaced worker costs nothing, a retry costs time, an interruption needs a command,
# lost work changes the result
REPLACED, RETRIED, INTERRUPTED, LOST_WORK = 1, 2, 3, 4

_CRASHING = Cause("data", WORKLOAD, CANNOT_HELP, "A shard of data ended every worker that tried it, and was quarantined.",
                  "inspect the archive that the evidence names")
_ARCHIVE = Cause("archive", INFRASTRUCTURE, CANNOT_HELP, "A damaged archive was quarantined.", "restore the archive")
_REJECTED = Cause("result", UNKNOWN, UNKNOWN,
                  "A result was rejected: diverging training, invalid data, or a faulty machine.",
                  "compare the workers and shards of the rejected jobs in the report", "ngsgd report {run}")
# incident -> (severity, cause)
_INCIDENTS = {
    "checkpoint_skipped": (INTERRUPTED, Cause("checkpoint", INFRASTRUCTURE, MAY_HELP,
                                              "A damaged checkpoint was skipped, and the previous one was used.",
                                              "check the disk of {run}")),
    "archive_quarantined": (LOST_WORK, _ARCHIVE),
    "outer_iteration_skipped": (LOST_WORK, Cause("data", WORKLOAD, CANNOT_HELP,
                                                 "All data of an outer iteration were in quarantine.",
                                                 "inspect the archives that the evidence names")),
    "worker_retired": (INTERRUPTED, Cause("worker", UNKNOWN, UNKNOWN, "A worker died too often and is not replaced.",
                                          "check its machine, then ngsgd stop {run}")),
    "worker_refused": (RETRIED, Cause("numeric fingerprint", INFRASTRUCTURE, CANNOT_HELP,
                                      "A replacement worker would compute other bits, and was rejected.",
                                      "install the same versions on every machine")),
    "worker_quarantined": (LOST_WORK, WRONG_MACHINE),
    "audit_ended": (RETRIED, Cause("code", WORKLOAD, CANNOT_HELP, "A job gives another result each time, so the audit ended.",
                                   "use random numbers of the job's seed only, or set failure.audit_every=0")),
    "rolled_back": (LOST_WORK, Cause("learning rate", WORKLOAD, CANNOT_HELP,
                                     "An outer iteration diverged and was repeated at half the learning rate.",
                                     "start the next run with schedule.lr_initial={half_lr}", "ngsgd report {run}")),
    "bad_batch": (LOST_WORK, Cause("data", WORKLOAD, CANNOT_HELP, "Examples give a loss or gradient that is not finite.",
                                   "correct the examples that the evidence names, or set failure.on_bad_batch=quarantine")),
    "exchange_failed": (RETRIED, Cause("transfer", INFRASTRUCTURE, MAY_HELP, "Averaging among the workers failed.",
                                       "check the network between the workers")),
}


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
    return [*_of_jobs(ledger), *_of_results(ledger), *_of_incidents(events), *_of_processes(events, is_alive=is_alive)]


def _of_jobs(ledger: Sequence[Line]) -> Iterator[Fault]:
    for one in failures_of(ledger):
        severity, cause = _judged(one)
        yield Fault(severity, cause, tuple(quoted(line) for line in (*one.attempts, *([one.end] if one.end else []))),
                    tuple(line.worker for line in one.attempts if line.worker >= 0), one.attempts[-1].kind)


def _judged(one: JobFailures) -> tuple[int, Cause]:
    """Severity and cause of the failed attempts at a job, from its end."""
    cause, end = of_worker(one.attempts[-1].kind), one.end.event if one.end else ""
    if end == "accepted":
        # a job is a deterministic function of its inputs: a retry that succeeded had the same data
        domain = UNKNOWN if cause.domain == WORKLOAD else cause.domain
        return RETRIED, replace(cause, domain=domain, outlook=MAY_HELP)
    if end == "quarantined":
        return LOST_WORK, _ARCHIVE if one.end and one.end.kind == FailureKind.DAMAGED_ARCHIVE else _CRASHING
    if end == "dropped" and len(one.attempts) > 1:
        return LOST_WORK, replace(cause, outlook=CANNOT_HELP)
    return LOST_WORK if end in ("dropped", "rejected") else RETRIED, cause


def _of_results(ledger: Sequence[Line]) -> Iterator[Fault]:
    failed = {(*line.job, line.fields.get("attempt")) for line in ledger if line.event == "failed"}
    for line in ledger:
        workers = (line.worker,) if line.worker >= 0 else ()
        if line.event == "rejected" and line.reason != NOT_THE_BEST:
            yield Fault(LOST_WORK, _REJECTED, (quoted(line),), workers)
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
            cause = replace(of_worker(line.kind), outlook=MAY_HELP)
            if cause.domain == WORKLOAD:
                cause = replace(cause, domain=UNKNOWN)
            yield Fault(REPLACED, cause, (quoted(line),), workers, line.kind)
        elif what in _INCIDENTS:
            severity, cause = _INCIDENTS[what]
            yield Fault(severity, cause, (quoted(line),), workers, line.kind)


def _of_processes(events: Sequence[Line], *, is_alive: bool) -> Iterator[Fault]:
    """Processes of the run that were killed, or that ended with an error."""
    opened: Line | None = None
    for line in events:
        if line.event == "opened":
            if opened is not None:
                yield Fault(INTERRUPTED, KILLED, (_unclosed(opened),))
            opened = line
        elif line.event == "error":
            yield Fault(INTERRUPTED, of_error(line.fields), (quoted(line),))
        elif line.event == "closed":
            opened = None
    if opened is not None and not is_alive:
        yield Fault(INTERRUPTED, KILLED, (_unclosed(opened),))


def _unclosed(opened: Line) -> Evidence:
    return Evidence(opened.source, f"a process began here ({opened.fields.get('purpose')}), and no line reports its end")
