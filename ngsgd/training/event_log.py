"""The event log: everything a tracker hears, one JSON line each, in the run's own folder."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord

_DERIVED = ("objf", "accuracy", "skew", "max_change_share", "max_param_change_share")


class EventLog:
    """Appends to events.jsonl; works when every dashboard is down."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self._write("outer_iteration", {**asdict(record), **{name: getattr(record, name) for name in _DERIVED}})

    def incident(self, incident: Incident) -> None:
        self._write("incident", asdict(incident))

    def finished(self, report: FinalReport) -> None:
        self._write("finished", asdict(report))

    def close(self, status: str) -> None:
        with contextlib.suppress(OSError):  # a full disk has been told already
            self._write("closed", {"status": status})
            self._file.close()

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()
