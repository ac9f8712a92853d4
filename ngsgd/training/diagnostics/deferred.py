"""Records of committed outer iterations whose diagnostics still run.

A record survives the process: the checkpoint holds it, and a resumed run repeats the diagnosis of
the model of that checkpoint with identical results.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import nn

from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.task import Evaluation, Task

# niceness of the thread: workers on the same cores have priority
_NICENESS = 19


class DeferredDiagnostics:
    """Evaluates models in a thread of low priority, and reports their records in order.

    At most one record is waiting, since there is one copy of the model.
    """

    def __init__(self, model: nn.Module, task: Task, report: Callable[[OuterIterationRecord], None]) -> None:
        # evaluation mode: no dropout
        self._model = copy.deepcopy(model).eval()
        self._report = report
        # raises errors here instead of in the thread after the first outer iteration
        task.prepare_evaluation(self._model)
        self._evaluate = torch.no_grad()(lambda: task.evaluate(self._model))
        self._thread = ThreadPoolExecutor(1, "ngsgd-diagnostics", initializer=_lower_priority)
        self._waiting: tuple[OuterIterationRecord, Future[Evaluation]] | None = None

    def wait(self) -> None:
        """Block until no record is waiting."""
        if self._waiting:
            self._pass_on(*self._waiting)

    def report_finished(self) -> None:
        """Report the waiting record if its diagnosis is done."""
        if self._waiting and self._waiting[1].done():
            self._pass_on(*self._waiting)

    def add(self, record: OuterIterationRecord, load: Callable[[nn.Module], object]) -> None:
        """Start the diagnosis of the model set by `load`, after waiting for the previous one."""
        self.wait()
        load(self._model)
        self._waiting = record, self._thread.submit(self._evaluate)

    def close(self) -> None:
        """Wait for the running evaluation, and end the thread."""
        self._thread.shutdown()

    def _pass_on(self, record: OuterIterationRecord, diagnosis: Future[Evaluation]) -> None:
        self._waiting = None
        found = diagnosis.result()
        self._report(replace(record, train=found.train, valid=found.valid, diagnostics=found.figures))


def _lower_priority() -> None:
    # Linux has priorities per thread; elsewhere the thread runs at normal priority
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
