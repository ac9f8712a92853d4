"""Large results on huge pages.

Memory that is new to the process is handed out page by page, when it is written first: of 100 MB that is 25000 interruptions for
4 KiB each, several times the work of filling it.  With 2 MiB pages, which Linux gives to who asks (`transparent_hugepage` madvise
or always), it is next to nothing.
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

# smaller blocks are often used again, and then are not new
_LEAST_BYTES = 1 << 22
_HUGE_PAGE = 1 << 21


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """The system call; None where there are no huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return call


@functools.cache
def _malloc_trim() -> Callable[..., int] | None:
    """glibc's; None with other C libraries."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def give_back() -> None:
    """Returns to the system what is free in the heap, where the C library can, and what is kept there for copies.

    For after a passing need that is much larger than what is to come, such as a graph of second derivatives: it takes a few
    milliseconds, and as much again for what is then needed anew.
    """
    gemm.forget_copies()
    trim = _malloc_trim()
    if trim is not None:
        trim(ctypes.c_size_t(0))


def empty(like: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape, with dtype and device of `like`, whose elements are to be written; on huge pages if it is large."""
    num, width = math.prod(shape), like.element_size()
    call = _madvise() if like.device.type == "cpu" and num * width >= _LEAST_BYTES else None
    if call is None:
        return like.new_empty(shape)
    # so that it can begin with a page; what is not written takes no memory
    x = like.new_empty(num + _HUGE_PAGE // width)
    start = -x.data_ptr() % _HUGE_PAGE
    # advice: where the kernel does not take it, the memory is what it would have been
    call(ctypes.c_void_p(x.data_ptr() + start), ctypes.c_size_t(num * width // _HUGE_PAGE * _HUGE_PAGE), mmap.MADV_HUGEPAGE)
    return x[start // width:start // width + num].view(shape)


def apart(like: Tensor, *shape: int) -> Tensor:
    """The same for what lives long beside tensors that come and go: a large one is not of the heap.

    There it would lie between blocks that are freed, whose holes are too small for others: a heap grows by that.  Its memory goes
    back to the system with the tensor; so this is slower than `empty` for what is made at every step.
    """
    num, width = math.prod(shape), like.element_size()
    if like.device.type != "cpu" or num * width < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return empty(like, *shape)
    block = mmap.mmap(-1, num * width + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(block, dtype=like.dtype)   # keeps the block
    start = -x.data_ptr() % _HUGE_PAGE
    # the rest in small pages, so that no more is taken than is needed
    block.madvise(mmap.MADV_HUGEPAGE, start, num * width // _HUGE_PAGE * _HUGE_PAGE)
    return x[start // width:start // width + num].view(shape)
