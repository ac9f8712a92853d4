"""A clock for deadlines of other processes that does not count time in which this one was
stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# between two polls of a loop that polls several times a second
LONGEST_STEP_S = 1.0


class AwakeClock:
    """Seconds during which this process ran; stopped time is mostly not counted.

    SIGSTOP, a paused container or virtual machine, and a batch system that suspends a job stop the
    coordinator together with its workers. After the wake-up every deadline has passed although no
    worker had time to finish. A polling loop calls `tick` each time. The excess of a step over
    `longest_step_s` is treated as an absence of this process and is not counted. The rest is
    counted, so deadlines also pass if each step takes too long.

    The base is CLOCK_MONOTONIC. It stops while the machine is suspended, as the workers do, so a
    suspended laptop needs no special case. CLOCK_BOOTTIME would count that time.

    Args:
        clock: seconds since any fixed point.
        longest_step_s: maximum time counted between two ticks, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, longest_step_s: float = LONGEST_STEP_S) -> None:
        self.longest_step_s = longest_step_s
        self._clock = clock
        self._last = clock()
        self._awake_s = 0.0

    @property
    def now(self) -> float:
        """Seconds awake at the last tick."""
        return self._awake_s

    def tick(self) -> float:
        """Count the time since the last tick; return the seconds of it that were an absence."""
        step_s = self._step()
        counted_s = min(step_s, self.longest_step_s)
        self._awake_s += counted_s
        return step_s - counted_s

    def catch_up(self) -> None:
        """Count the complete time since the last tick: this process was busy with other work."""
        self._awake_s += self._step()

    def _step(self) -> float:
        last, self._last = self._last, self._clock()
        return self._last - last
