"""Names of the steps of a run, for callbacks that take lines of progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ngsgd.counting import duration

T = TypeVar("T")
# yields the same items, such as `Progress.each`, or `iter` without a report
Each = Callable[[Iterable[Any]], Iterable[Any]]
# seconds between two lines of one step
REPORT_S = 5.0


class Phase(str):
    """The step that begins now; it ends at the next phase or at the first outer iteration.

    A `report` callback receives it like any other line. A terminal shows it with the time that it
    has taken so far.
    """

    __slots__ = ()


class Progress:
    """A step that reports how many of its items are done, every `REPORT_S` seconds, in any thread.

    Args:
        report: receives the phase, at once and then with the number of items and the time left.
        name: of the step.
        total: number of items. Default: 0, for an unknown number.
        unit: noun of an item, in the plural. Default: "utterances".
    """

    def __init__(self, report: Callable[[str], None], name: str, total: int = 0, unit: str = "utterances") -> None:
        self._report, self._name, self._total, self._unit = report, name, total, unit
        self._done, self._begun, self._lock = 0, time.monotonic(), threading.Lock()
        self._last = self._begun
        report(Phase(name))

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, which may be a part of all."""
        for item in items:
            if not self._done:
                # the preparation of the first one is not repeated
                self._begun = time.monotonic()
            yield item
            self.add(1)

    def add(self, number: int) -> None:
        """Count items that are done."""
        with self._lock:
            self._done, now = self._done + number, time.monotonic()
            if not number or now - self._last < REPORT_S:
                return
            self._last, left = now, ""
            if self._total:
                seconds = (now - self._begun) / self._done * max(0, self._total - self._done)
                left = f"of {self._total} {self._unit}, about {duration(seconds)} left"
            self._report(Phase(f"{self._name}: {self._done} {left or self._unit}"))
