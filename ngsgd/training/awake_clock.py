"""A clock for deadlines that others must keep, in a process that may itself be stopped for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

# between two looks of a loop that polls several times a second
LONGEST_STEP_S = 1.0


class AwakeClock:
    """Seconds during which this process ran; time during which it was stopped hardly counts.

    SIGSTOP, a paused container or virtual machine, and a batch system that suspends a job stop the coordinator together
    with its workers.  After the wake-up every deadline has passed, and nobody has had the time to keep it.  A loop that
    polls calls `tick` each time: what a step is longer than `longest_step_s` was an absence of this process and is not counted.
    The rest is, so that deadlines pass even where each step takes too long.

    The base is CLOCK_MONOTONIC.  It stands still while the whole machine is suspended, as its workers do, so a suspended
    laptop needs no special case; CLOCK_BOOTTIME would count that time.

    Args:
        clock: seconds since any fixed point.
        longest_step_s: of the time between two ticks at most this much is counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, longest_step_s: float = LONGEST_STEP_S) -> None:
        self.longest_step_s = longest_step_s
        self._clock = clock
        self._last = clock()
        self._awake_s = 0.0

    @property
    def now(self) -> float:
        """Seconds awake, as of the last tick."""
        return self._awake_s

    def tick(self) -> float:
        """Counts the time since the last tick; returns the seconds of it that were an absence."""
        step_s = self._step()
        counted_s = min(step_s, self.longest_step_s)
        self._awake_s += counted_s
        return step_s - counted_s

    def catch_up(self) -> None:
        """Counts the time since the last tick, however long: this process was busy with other work."""
        self._awake_s += self._step()

    def _step(self) -> float:
        last, self._last = self._last, self._clock()
        return self._last - last
