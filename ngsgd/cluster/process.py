"""What a process that trains sets once, before its first minibatch."""

from __future__ import annotations

import ctypes
import functools

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3   # of glibc's malloc.h
# bytes; glibc refuses more
_LARGEST_FROM_HEAP = 32 << 20
# bytes of freed memory at the end of the heap
_KEPT = 1 << 30


def configure_process(num_threads: int) -> None:
    """Takes so many threads for torch's operations, on which the order of sums depends, and keeps what memory is freed."""
    torch.set_num_threads(num_threads)
    keep_freed_memory()


@functools.cache
def keep_freed_memory() -> bool:
    """Has the C library keep memory that is freed, up to 1 GiB, for the rest of the process; False where it is not glibc.

    Every step frees its gradients and the next one allocates them again.  glibc gives such memory back to the system at once, which
    then hands it out anew page by page: thousands of page faults a step, which took NG-SGD up to 8 % of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        # another C library, another system
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
