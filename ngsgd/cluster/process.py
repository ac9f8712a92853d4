"""Settings of a training process before its first minibatch."""

from __future__ import annotations

import ctypes
import functools

import torch

from ngsgd.ops.kernels import native

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3   # from malloc.h of glibc
# bytes; the maximum that glibc accepts
_LARGEST_FROM_HEAP = 32 << 20
# bytes of freed memory kept at the end of the heap
_KEPT = 1 << 30


def configure_process(num_threads: int, has_kernels: bool | None = None) -> None:
    """Set the number of torch threads (it determines the order of sums) and keep freed memory.

    Without `has_kernels` of the coordinator, torch operations compute here as they do there.
    """
    torch.set_num_threads(num_threads)
    if has_kernels is False:
        native.use_torch_operations()
    keep_freed_memory()


@functools.cache
def keep_freed_memory() -> bool:
    """Make the C library keep up to 1 GiB of freed memory; return False if it is not glibc.

    Every step frees its gradients and the next one allocates them again. glibc returns such memory
    to the system immediately, which then provides it again page by page. These thousands of page
    faults per step cost NG-SGD up to 8 % of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        # another C library or system
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
