"""Names of the steps of a run, for callbacks that take lines of progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
# seconds between two lines of one step
REPORT_S = 10.0


class Phase(str):
    """The step that begins now; it ends at the next phase or at the first outer iteration.

    A `report` callback receives it like any other line. A terminal shows it with the time that it
    has taken so far.
    """

    __slots__ = ()


class Progress:
    """A step that reports how many of its items are done, every `REPORT_S` seconds.

    Args:
        report: receives the phase, at once and then with the number of items.
        name: of the step.
        total: number of items. Default: 0, for an unknown number.
        unit: noun of an item, in the plural. Default: "utterances".
    """

    def __init__(self, report: Callable[[str], None], name: str, total: int = 0, unit: str = "utterances") -> None:
        self._report, self._name, self._of = report, name, f"of {total} {unit}" if total else unit
        self._done, self._last = 0, time.monotonic()
        report(Phase(name))

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, which may be a part of all."""
        for item in items:
            if time.monotonic() - self._last >= REPORT_S:
                self._report(Phase(f"{self._name}: {self._done} {self._of}"))
                self._last = time.monotonic()
            yield item
            self._done += 1
