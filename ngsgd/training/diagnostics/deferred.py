"""Records of committed outer iterations whose diagnostics still run.

Nothing is lost with the process: the checkpoint holds its record, and a resumed run diagnoses that checkpoint's model
again, which gives the same figures.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ngsgd.training.diagnostics.background import BackgroundDiagnostics
from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.task import Evaluation

Report = Callable[[OuterIterationRecord], None]


class _Waiting(NamedTuple):
    record: OuterIterationRecord
    diagnosis: Future[Evaluation]


class DeferredDiagnostics:
    """Completes records with their diagnosis and passes them on, in order; at most one is waiting."""

    def __init__(self, diagnostics: BackgroundDiagnostics, report: Report) -> None:
        self.diagnostics, self.report = diagnostics, report
        self._waiting: _Waiting | None = None

    def wait(self) -> None:
        """Returns when no record is waiting any more."""
        if self._waiting:
            self._pass_on(self._waiting)

    def report_finished(self) -> None:
        """Passes on what is ready."""
        if self._waiting and self._waiting.diagnosis.done():
            self._pass_on(self._waiting)

    def add(self, record: OuterIterationRecord, load: Callable[[nn.Module], object]) -> None:
        """Begins the diagnosis of the record's model, which `load` sets; waits for the one before."""
        self.wait()
        self._waiting = _Waiting(record, self.diagnostics.begin(load))

    def _pass_on(self, waiting: _Waiting) -> None:
        self._waiting = None
        found = waiting.diagnosis.result()
        self.report(replace(waiting.record, train=found.train, valid=found.valid, diagnostics=found.figures))
