"""The event log: every record of a run, one JSON line each, in the run folder.

It has exactly one "outer_iteration" line for each committed outer iteration, after any crash. Runs
of a custom task have loss and examples instead; `read_events` returns objf and frames for both.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ngsgd.files import MAX_LINE_BYTES, JsonLines, lines_from_end, log_lines, new_file, open_regular, parse_json_lines
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord
from ngsgd.training.storage.lock import RunLock

_DERIVED = ("objf", "accuracy", "skew", "max_change_share", "max_param_change_share")
_SUPERSEDED = "superseded_outer_iteration"
# of a log that is copied
_PART_BYTES = 1 << 20
# names of speech runs -> names in the log of a task
_OF_TASK = {"frames_processed": "examples_processed", "num_frames": "num_examples", "objf": "loss"}
_OF_SPEECH = {name: own for own, name in _OF_TASK.items()}
# fields that a task does not have, with the values in its records
_WITHOUT: dict[str, dict[str, Any]] = {"outer_iteration": {"accuracy": 0.0}, "job": {"accuracy": 0.0}, "subset": {"accuracy": 0.0},
                                       "finished": {"test_errors": None, "valid_errors": None, "interval": {}}}


class EventLog:
    """Appends to events.jsonl; independent of dashboards.

    Args:
        path: the file.
        after: the newest committed outer iteration, -1 before the first. Lines of later ones belong
            to commits that were lost with a damaged checkpoint, and are renamed. None keeps them.
        is_speech: False writes losses and examples instead of objf and frames.
        lock: the run lock, without which a process that was replaced writes outer iterations.
    """

    def __init__(self, path: Path, after: int | None = None, *, is_speech: bool = True, lock: RunLock | None = None) -> None:
        self._is_speech, self._lock = is_speech, lock
        # read first: an error leaves no open file
        self._last = _newest_line(path, after) if path.is_file() else -1
        self._lines = JsonLines(path)

    def has(self, outer_iter: int) -> bool:
        """Whether the line of an outer iteration is written; lines are in their order."""
        return outer_iter <= self._last

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        """Write the line and fsync it, before the checkpoint that could restore it is removed."""
        if self.has(record.outer_iter):
            return
        # its successor has written this line
        if self._lock:
            self._lock.require_held()
        derived = {name: getattr(record, name) for name in _DERIVED}
        self._write("outer_iteration", {**asdict(record), **derived})
        self._lines.sync()
        self._last = record.outer_iter

    def opened(self, purpose: str) -> None:
        """Record that a process begins to train or resumes; one without "closed" was killed."""
        self._write("opened", {"purpose": purpose, "unix_s": round(time.time(), 3)})
        self._lines.sync()

    def failed(self, about: Mapping[str, Any]) -> None:
        """Record the error that ends the process, as in error.json."""
        self._write("error", dict(about))

    def incident(self, incident: Incident) -> None:
        self._write("incident", asdict(incident))

    def finished(self, report: FinalReport) -> None:
        self._write("finished", asdict(report))

    def close(self, status: str) -> None:
        # a full disk has been reported already; later resources must still be closed
        with contextlib.suppress(OSError):
            self._write("closed", {"status": status})
        self._lines.close()

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        fields = fields if self._is_speech else _converted(event, fields, to_task=True)
        self._lines.append({"event": event, **fields})


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the valid events of a run in order, skipping damaged lines; empty without a file."""
    return list(events_of(path))


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of `read_events` in constant memory."""
    for line in log_lines(path) if path.is_file() else ():
        yield from valid_events(parse_json_lines(line))


def newest_events(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (event, bytes from its line to the end of the log), the newest event first."""
    for line, num_bytes in lines_from_end(path) if path.is_file() else ():
        yield from ((event, num_bytes) for event in valid_events(parse_json_lines(line)))


def valid_events(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a log for which `is_valid`, in the words of speech runs."""
    return [event for event in map(_in_words_of_speech, lines) if is_valid(event)]


def is_valid(event: dict[str, Any]) -> bool:
    """Whether an event has all fields of its kind, with values of the right types."""
    try:
        match event.get("event"):
            case "outer_iteration":
                OuterIterationRecord.from_json(event)
            case "finished":
                FinalReport.from_json(event)
            case "incident":
                return isinstance(event["message"], str) and isinstance(event["outer_iter"], int)
            case "closed":
                return isinstance(event["status"], str)
            case kind:
                return isinstance(kind, str)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _newest_line(path: Path, after: int | None) -> int:
    """Return the newest outer iteration up to `after`, -1 without one; rename later lines."""
    newest, changed_bytes = -1, 0
    # closed here: the traceback of a full disk would keep the file open
    with contextlib.closing(lines_from_end(path)) as lines:
        # JsonLines removes an incomplete last line, which may be valid
        next(lines)
        for line, num_bytes in lines:
            outer_iter = _outer_iter_of(line)
            if outer_iter is None:
                continue
            if after is None or outer_iter <= after:
                newest = outer_iter
                break
            changed_bytes = num_bytes
    if changed_bytes:
        _rename_lines(path, changed_bytes)
    return newest


def _outer_iter_of(line: str) -> int | None:
    """The outer iteration that a line reports; None for other lines."""
    return next((event["outer_iter"] for event in valid_events(parse_json_lines(line))
                 if event["event"] == "outer_iteration"), None)


def _rename_lines(path: Path, num_bytes: int) -> None:
    """Rename the lines of outer iterations in the last bytes of a log, in constant memory."""
    with new_file(path) as temporary, temporary.open("wb") as new, open_regular(path) as old:
        left = os.fstat(old.fileno()).st_size - num_bytes
        while left and (part := old.read(min(left, _PART_BYTES))):
            new.write(part)
            left -= len(part)
        while line := old.readline(MAX_LINE_BYTES):
            text = line.decode("utf-8", errors="replace")
            if _outer_iter_of(text) is not None:
                line = (json.dumps({**parse_json_lines(text)[0], "event": _SUPERSEDED}) + "\n").encode()
            new.write(line)


def _in_words_of_speech(event: dict[str, Any]) -> dict[str, Any]:
    """Convert the line of a task; those of speech runs are unchanged, a damaged one is empty."""
    if event.get("event") not in ("outer_iteration", "finished") or "examples_processed" not in event:
        return event
    with contextlib.suppress(AttributeError, TypeError):
        return _converted(event["event"], event, to_task=False)
    return {}


def _converted(kind: str, fields: dict[str, Any], *, to_task: bool) -> dict[str, Any]:
    """Convert a record to loss and examples instead of objf and frames, or back."""
    names, negated = (_OF_TASK, "objf") if to_task else (_OF_SPEECH, "loss")
    without: dict[str, Any] = _WITHOUT.get(kind, {})
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "jobs":
            found[name] = [_converted("job", job, to_task=to_task) for job in value]
        elif name in ("train", "valid"):
            found[name] = _converted("subset", value, to_task=to_task)
        elif not to_task or name not in without:
            found[names.get(name, name)] = 0.0 - value if name == negated else value
    return found if to_task else {**found, **without}
