"""The wait for workers that are missing, at the start of a run and after the loss of machines."""

from __future__ import annotations

import time
from collections.abc import Callable

# between two lines
EVERY_S = 10.0


class WorkerWait:
    """Reports the wait regularly, and ends it after a time without a sign of life.

    Workers that import or compile use the processor, and are waited for.

    Args:
        timeout_s: seconds since the last sign of life (cluster.wait_for_workers_s).
        report: takes lines of progress.
    """

    def __init__(self, timeout_s: float, report: Callable[[str], object]) -> None:
        self.timeout_s, self._report = timeout_s, report
        # last sign of life, and last line; None: enough workers are there
        self._seen_s: float | None = None
        self._line_s = 0.0

    def is_over(self, now: float, alive: int, needed: int, total: int, has_busy_start: Callable[[], bool]) -> bool:
        """Whether too few workers are there, and none came or was busy for too long.

        Args:
            now: seconds on the caller's clock.
            alive: workers that can take jobs.
            needed: minimum number of these.
            total: number that was asked for.
            has_busy_start: whether a worker that starts was busy since the last call.
        """
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
