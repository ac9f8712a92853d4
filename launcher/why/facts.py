"""The lines of a run's files that explain a failure, with their positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.files import last_lines, lines_from_end, parse_json_lines
from ngsgd.runs.run_folder import RunFolder

# characters of one piece of evidence
_WIDEST = 300
# of the end of a log
_MAX_BYTES = 16 << 20
_SETTLED = ("accepted", "rejected", "dropped", "deferred", "quarantined")
# incidents that repeat a line of the ledger
IN_LEDGER = ("worker_died", "job_failed", "job_dropped", "job_rejected", "shard_quarantined", "job_continued")


@dataclass(frozen=True)
class Line:
    # file and line number, such as "ledger.jsonl:12"
    source: str
    fields: dict[str, Any]

    @property
    def event(self) -> str:
        return str(self.fields.get("event"))

    @property
    def job(self) -> tuple[int, int]:
        """(outer iteration, job); -1 where there is none."""
        return _int(self.fields.get("outer_iter")), _int(self.fields.get("job"))

    @property
    def worker(self) -> int:
        return _int(self.fields.get("worker"))

    @property
    def reason(self) -> str:
        return str(self.fields.get("reason", ""))

    @property
    def kind(self) -> str:
        """The FailureKind; empty where there is none."""
        return str(self.fields.get("kind", ""))


@dataclass(frozen=True)
class Evidence:
    source: str
    text: str


def lines_of(path: Path) -> list[Line]:
    """Well-formed lines of a log in order; empty without a file.

    Of a long log, which has gigabytes, the end is read, and lines are counted from there: -1 is the
    last one. Lines of jobs and outer iterations without a fault are skipped.
    """
    end = list[tuple[int, str]]()
    try:
        for number, (line, num_bytes) in enumerate(lines_from_end(path) if path.is_file() else ()):
            if num_bytes > _MAX_BYTES:
                break
            if number <= 1 or not _is_calm(line):
                end.append((number, line))
    except OSError:
        return []
    is_complete = not end or num_bytes <= _MAX_BYTES
    total = number + 1 if end and is_complete else 0
    return [Line(f"{path.name}:{total - back if is_complete else -back}", found) for back, line in reversed(end)
            for found in parse_json_lines(line)]


def _is_calm(line: str) -> bool:
    """Whether a line is one of many that report no fault."""
    start = line[:80]
    return (start.startswith('{"event": "submitted"') or (start.startswith('{"event": "planned"') and '"job": 0,' not in start)
            or (start.startswith('{"event": "outer_iteration"') and '"bad_examples": {"' not in line))


def failures_of(ledger: Sequence[Line]) -> list[list[Line]]:
    """Failed attempts by job, in the order of the ledger, and last the line that settled it."""
    found: list[list[Line]] = []
    pending: dict[tuple[int, int], list[Line]] = {}
    for line in ledger:
        if line.event == "failed":
            if line.job not in pending:
                pending[line.job] = []
                found.append(pending[line.job])
            pending[line.job].append(line)
        elif line.event in _SETTLED and line.job in pending:
            pending.pop(line.job).append(line)
    return found


def quoted(line: Line) -> Evidence:
    """A line as evidence: where in the run, and the reason."""
    outer_iter, job = line.job
    where = f"outer iteration {outer_iter + 1}" if outer_iter >= 0 else ""
    where = f"job {job} of {where}" if job >= 0 else where
    attempt = f"attempt {line.fields['attempt']}" if "attempt" in line.fields else ""
    who = f"worker {line.worker}" if line.worker >= 0 else ""
    message = line.reason or str(line.fields.get("message") or line.fields.get("status") or "")
    place = ", ".join(part for part in (line.fields.get("what") or line.event, where, attempt, who) if part)
    return Evidence(line.source, cut(f"{place}: {message}" if message else place))


def cut(text: str) -> str:
    """The first line of a text, of limited length."""
    first = text.split("\n", 1)[0]
    return first if len(first) <= _WIDEST else f"{first[:_WIDEST - 3]}..."


def log_tail(folder: RunFolder, workers: Sequence[int], num_lines: int = 2) -> Iterator[Evidence]:
    """The last lines of the logs of workers."""
    for worker in sorted(set(workers)):
        path = folder.workers / f"worker-{worker}.log"
        try:
            lines = [line for line in last_lines(path, 50) if line.strip()] if path.is_file() else []
        except OSError:
            continue
        yield from (Evidence(f"workers/{path.name}", cut(line.strip())) for line in lines[-num_lines:])


def _int(value: object) -> int:
    return value if type(value) is int else -1
