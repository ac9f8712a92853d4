"""Settings of a training process before its first minibatch."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ngsgd.ops.kernels import native

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3   # from malloc.h of glibc
_LARGEST_FROM_HEAP = 32 << 20  # bytes; the maximum that glibc accepts
_KEPT = 1 << 30  # bytes of freed memory kept at the end of the heap


def configure_process(num_threads: int, has_kernels: bool | None = None) -> None:
    """Set the number of torch threads (it determines the order of sums) and keep freed memory.

    If the coordinator has no kernels, torch operations compute here as they do there.
    """
    torch.set_num_threads(num_threads)
    if has_kernels is False:
        native.use_torch_operations()
    keep_freed_memory()


@functools.cache
def keep_freed_memory() -> bool:
    """Make the C library keep up to 1 GiB of freed memory; return False if it is not glibc.

    Every step frees its gradients, and the next one allocates them again. The page faults of memory
    that glibc returned to the system cost NG-SGD up to 8 % of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        # another C library or system
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and mallopt(_M_TRIM_THRESHOLD, _KEPT))


_BUSY = 0.02  # fraction of a processor; waiting threads of Ray and of torch use less
# seconds; the kernel counts in steps of 10 ms, so two readings can differ by one step for nothing
_COUNTED = 0.03


@dataclass(frozen=True)
class Activity:
    """What a process has used so far."""

    cpu_s: float  # of the process and of its ended children
    at_s: float  # on the clock of its machine
    has_child: bool  # such as a compiler

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
