"""The simulated world of one trial: clock, fault schedule, counters and trace of events."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# operations without an end: a trial that waits this often makes no progress
MAX_WAITS = 60_000
# a finished trial has at most a few thousand
MAX_OPERATIONS = 20_000


class Killed(BaseException):
    """The simulated coordinator process ends at this point; no code catches it."""


class NoProgressError(BaseException):
    """The run exceeded the bound of the trial."""


@dataclass(frozen=True)
class Fault:
    """One fault; `where` names a counter, and `at` the value at which it occurs."""

    where: str
    at: int
    what: str
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} at {self.where} {self.at}" + (f" ({self.value:g})" if self.value else "")


class World:
    """Time, faults and events that all simulated parts of a trial share."""

    def __init__(self, faults: Iterable[Fault] = (), limit_s: float = 1e9) -> None:
        self.now = 0.0
        self.limit_s = limit_s
        # the coordinator process has been killed; everything it does later fails
        self.is_dead = False
        # kind of the power cut that ended it; empty: the process alone ended
        self.cut = ""
        self.counts: Counter[str] = Counter()
        # step of the coordinator, and the one at each counted point
        self.phase = "begins"
        self.phases: dict[str, list[str]] = {}
        # (fault, phase) that occurred together
        self.covered: set[tuple[str, str]] = set()
        # faults that occurred
        self.occurred: list[Fault] = []
        # violations that a simulated part observed
        self.problems: list[str] = []
        self.lines: list[str] | None = None
        self._digest = hashlib.blake2b(digest_size=8)
        self._faults: dict[tuple[str, int], list[Fault]] = {}
        self._lasting: dict[str, list[Fault]] = {}
        for fault in faults:
            self._faults.setdefault((fault.where, fault.at), []).append(fault)
            self._lasting.setdefault(fault.where, []).append(fault)

    def clock(self) -> float:
        return self.now

    def note(self, *event: object) -> None:
        """Add an event to the trace."""
        line = " ".join(map(str, event))
        self._digest.update(f"{self.now!r} {line}\n".encode())
        if self.lines is not None:
            self.lines.append(f"{self.now:10.3f} {line}")

    def trace(self) -> str:
        """Digest of all events so far."""
        return self._digest.hexdigest()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.limit_s:
            raise NoProgressError(f"the run did not end within {self.limit_s:g} simulated seconds")

    def due(self, where: str) -> list[Fault]:
        """Count a point and return the faults that occur at it."""
        at = self.counts[where]
        self.counts[where] = at + 1
        self.phases.setdefault(where, []).append(self.phase)
        faults = self._faults.get((where, at), [])
        for fault in faults:
            self.occurred.append(fault)
            self.covered.add((fault.what, self.phase))
            self.note("fault", fault)
        return faults

    def lasting(self, where: str) -> list[Fault]:
        """Faults that last for the complete run; `at` is the component."""
        return self._lasting.get(where, [])

    def occur(self, fault: Fault) -> None:
        """Record that a lasting fault had an effect."""
        if fault not in self.occurred:
            self.occurred.append(fault)
        self.covered.add((fault.what, self.phase))
        self.note("fault", fault)

    def kill(self, cut: str = "") -> None:
        """End the coordinator process."""
        self.is_dead, self.cut = True, cut
        raise Killed(cut)

    def report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run another simulated process while this one is stopped."""
        dead, cut = self.is_dead, self.cut
        self.is_dead, self.cut = False, ""
        try:
            yield
        finally:
            self.is_dead, self.cut = dead, cut
