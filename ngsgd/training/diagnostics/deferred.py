"""Records of committed outer iterations whose diagnostics still run.

A record survives the process: the checkpoint holds it, and a resumed run repeats the diagnosis of
the model of that checkpoint with identical results.
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
    """Completes records with their diagnosis and reports them in order; at most one is waiting."""

    def __init__(self, diagnostics: BackgroundDiagnostics, report: Report) -> None:
        self.diagnostics, self.report = diagnostics, report
        self._waiting: _Waiting | None = None

    def wait(self) -> None:
        """Block until no record is waiting."""
        if self._waiting:
            self._pass_on(self._waiting)

    def report_finished(self) -> None:
        """Report the waiting record if its diagnosis is done."""
        if self._waiting and self._waiting.diagnosis.done():
            self._pass_on(self._waiting)

    def add(self, record: OuterIterationRecord, load: Callable[[nn.Module], object]) -> None:
        """Start the diagnosis of the model set by `load`, after waiting for the previous one."""
        self.wait()
        self._waiting = _Waiting(record, self.diagnostics.begin(load))

    def _pass_on(self, waiting: _Waiting) -> None:
        self._waiting = None
        found = waiting.diagnosis.result()
        self.report(replace(waiting.record, train=found.train, valid=found.valid, diagnostics=found.figures))
