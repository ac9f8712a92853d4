"""Large results on huge pages.

The kernel maps new memory page by page at the first write. For 100 MB these are 25000 page faults
of 4 KiB, which take several times as long as filling the memory. With 2 MiB pages, which Linux
provides on request (`transparent_hugepage` madvise or always), the cost is negligible.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from ngsgd.ops import gemm

# Smaller blocks are often reused, and then already mapped.
_LEAST_BYTES = 1 << 22
_HUGE_PAGE = 1 << 21


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """Return the system call; None without huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return call


@functools.cache
def _malloc_trim() -> Callable[..., int] | None:
    """Return the function of glibc; None with other C libraries."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def give_back() -> None:
    """Return free heap memory and cached copy buffers to the system, if the C library supports it.

    Call it after a temporary peak, such as a graph of second derivatives. It takes a few
    milliseconds, and as much again for memory that is needed later.
    """
    gemm.forget_copies()
    trim = _malloc_trim()
    if trim is not None:
        trim(ctypes.c_size_t(0))


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized tensor with dtype and device of `like`.

    On huge pages if it is large.
    """
    num, width = math.prod(shape), like.element_size()
    call = _madvise() if like.device.type == "cpu" and num * width >= _LEAST_BYTES else None
    if call is None:
        return like.new_empty(shape)
    # Reserve space for page alignment; unwritten pages take no memory.
    x = like.new_empty(num + _HUGE_PAGE // width)
    start = -x.data_ptr() % _HUGE_PAGE
    # Only advice: without support the memory has ordinary pages.
    call(ctypes.c_void_p(x.data_ptr() + start), ctypes.c_size_t(num * width // _HUGE_PAGE * _HUGE_PAGE), mmap.MADV_HUGEPAGE)
    return x[start // width:start // width + num].view(shape)


def apart(like: Tensor, *shape: int) -> Tensor:
    """Return the same outside the heap, for long-lived tensors among short-lived ones.

    On the heap such a tensor would lie between freed blocks, and fragmentation would increase the
    heap. Its memory returns to the system with the tensor; it is therefore slower than `empty` for
    tensors of every step.
    """
    num, width = math.prod(shape), like.element_size()
    if like.device.type != "cpu" or num * width < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return empty(like, *shape)
    block = mmap.mmap(-1, num * width + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(block, dtype=like.dtype)   # keeps the block alive
    start = -x.data_ptr() % _HUGE_PAGE
    # The rest in small pages, to avoid excess memory.
    block.madvise(mmap.MADV_HUGEPAGE, start, num * width // _HUGE_PAGE * _HUGE_PAGE)
    return x[start // width:start // width + num].view(shape)
