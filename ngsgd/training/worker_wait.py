"""The wait for workers that are missing, at the start of a run and after the loss of machines."""

from __future__ import annotations

import time
from collections.abc import Callable

# between two lines
EVERY_S = 10.0


class WorkerWait:
    """Reports the wait regularly, and ends it `timeout_s` seconds after the last sign of life.

    Workers that import or compile use the processor, and are waited for.
    """

    def __init__(self, timeout_s: float, report: Callable[[str], object]) -> None:
        self.timeout_s, self._report = timeout_s, report
        # last sign of life, and last line; None: enough workers are there
        self._seen_s: float | None = None
        self._line_s = 0.0

    def is_over(self, now: float, alive: int, needed: int, total: int, has_busy_start: Callable[[], bool]) -> bool:
        """Whether too few workers are there, and none came or was busy since for too long."""
        if alive >= needed:
            self._seen_s = None
            return False
        if self._seen_s is None:
            has_busy_start()
            self._seen_s = self._line_s = now
        is_late = now - self._seen_s >= self.timeout_s
        if (is_late or now - self._line_s >= EVERY_S) and has_busy_start():
            self._seen_s, is_late = now, False
        if now - self._line_s >= EVERY_S:
            self._line_s = now
            until = time.localtime(time.time() + self._seen_s + self.timeout_s - now)
            self._report(f"waiting for workers ({alive} of {total}), until {time.strftime('%H:%M:%S', until)}")
        return is_late


# time that counts between two polls of a loop that polls several times a second
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
        last, self._last = self._last, self._clock()
        step_s = self._last - last
        counted_s = min(step_s, self.longest_step_s)
        self._awake_s += counted_s
        return step_s - counted_s

    def catch_up(self) -> None:
        """Count the complete time since the last tick: this process was busy with other work."""
        last, self._last = self._last, self._clock()
        self._awake_s += self._last - last
