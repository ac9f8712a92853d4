"""Signs of life of processes that start: the processor time they use, and their compilers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# fraction of a processor; waiting threads of Ray and of torch use less
_BUSY = 0.02
# seconds; the kernel counts in steps of 10 ms, so two readings can differ by one step for nothing
_COUNTED = 0.03


@dataclass(frozen=True)
class Activity:
    """What a process has used so far."""

    # of the process and of its ended children
    cpu_s: float
    # on the clock of its machine
    at_s: float
    # such as a compiler
    has_child: bool

    def is_busy(self, before: Activity | None) -> bool:
        """Whether the process did something since `before`, an earlier reading of it."""
        return self.has_child or (before is not None and self.cpu_s - before.cpu_s > _COUNTED + _BUSY * (self.at_s - before.at_s))


def activity_of(process_id: int) -> Activity | None:
    """Read the activity of a process of this machine; None if it has ended."""
    proc = Path("/proc") / str(process_id)
    try:
        # the name in parentheses may have spaces
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        has_child = any(file.read_text().strip() for file in proc.glob("task/*/children"))
    except (OSError, ValueError):
        return None
    # utime, stime, cutime, cstime
    return Activity(sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), time.monotonic(), has_child)
