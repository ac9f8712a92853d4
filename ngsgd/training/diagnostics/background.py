"""Evaluation of committed models in a background thread, while the next outer iteration trains."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from ngsgd.training.task import Evaluation, Task

# niceness of the thread: workers on the same cores have priority
_NICENESS = 19


class BackgroundDiagnostics:
    """Evaluates one model after another in a thread of low priority."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        # evaluation mode: no dropout
        self._model = copy.deepcopy(model).eval()
        self._task = task
        # raises errors here instead of in the thread after the first outer iteration
        task.prepare_evaluation(self._model)
        self._thread = ThreadPoolExecutor(1, "ngsgd-diagnostics", initializer=_lower_priority)

    def begin(self, load: Callable[[nn.Module], object]) -> Future[Evaluation]:
        """Load the parameters with `load` now, and evaluate the model in the thread.

        The previous evaluation must have ended, since there is one copy of the model.
        """
        load(self._model)
        return self._thread.submit(self._evaluate)

    @torch.no_grad()
    def _evaluate(self) -> Evaluation:
        return self._task.evaluate(self._model)

    def close(self) -> None:
        """Wait for the running evaluation, and end the thread."""
        self._thread.shutdown()


def _lower_priority() -> None:
    # Linux has priorities per thread; elsewhere the thread runs at normal priority
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
