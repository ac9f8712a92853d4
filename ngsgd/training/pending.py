"""Records of committed outer iterations whose diagnostics still run.

Nothing is lost with the process: a record waits in a small file beside the checkpoints, and a resumed run diagnoses that
checkpoint's model again, which gives the same figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from ngsgd.training.diagnostics import BackgroundDiagnostics, Diagnosis
from ngsgd.training.records import OuterIterationRecord

Tell = Callable[[OuterIterationRecord], None]


class _Waiting(NamedTuple):
    record: OuterIterationRecord
    diagnosis: Future[Diagnosis]


class PendingRecords:
    """Completes records with their diagnosis and passes them on, in order; at most one is waiting."""

    def __init__(self, diagnostics: BackgroundDiagnostics, path: Path, tell: Tell) -> None:
        self.diagnostics, self.path, self.tell = diagnostics, path, tell
        self._waiting: _Waiting | None = None

    def wait(self) -> None:
        """Returns when no record is waiting any more."""
        if self._waiting:
            self._pass_on(self._waiting)

    def look(self) -> None:
        """Passes on what is ready."""
        if self._waiting and self._waiting.diagnosis.done():
            self._pass_on(self._waiting)

    def add(self, record: OuterIterationRecord, load: Callable[[nn.Module], object]) -> None:
        """Begins the diagnosis of the record's model, which `load` sets; waits for the one before."""
        self.wait()
        # whole or absent, but not synced, which would delay training: after a power cut the log may lack a line
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        temporary.rename(self.path)
        self._waiting = _Waiting(record, self.diagnostics.begin(load))

    def take_up(self, outer_iter: int, load: Callable[[nn.Module], object]) -> None:
        """Goes on with the record that a process left behind, if it is that of the checkpoint at hand."""
        try:
            record = OuterIterationRecord.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError):  # of another version; the log lacks a line, the run nothing
            record = None
        if record is not None and record.outer_iter == outer_iter:
            self.add(record, load)
        else:
            self.path.unlink()

    def _pass_on(self, waiting: _Waiting) -> None:
        self._waiting = None
        found = waiting.diagnosis.result()
        self.tell(replace(waiting.record, train=found.train, valid=found.valid, diagnostics=found.figures))
        self.path.unlink(missing_ok=True)
