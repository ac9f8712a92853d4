"""Large results on huge pages: 25000 page faults of 4 KiB per 100 MB take longer than a product."""

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
def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if it has no such function or no huge pages."""
    return getattr(ctypes.CDLL(None), name, None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def give_back() -> None:
    """Return free heap memory and copy buffers to the system, after a temporary peak."""
    gemm.forget_copies()
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized tensor with dtype and device of `like`, on huge pages if large."""
    num, width = math.prod(shape), like.element_size()
    call = _of_libc("madvise") if like.device.type == "cpu" and num * width >= _LEAST_BYTES else None
    if call is None:
        return like.new_empty(shape)
    # Reserve space for page alignment; unwritten pages take no memory.
    x = like.new_empty(num + _HUGE_PAGE // width)
    start = -x.data_ptr() % _HUGE_PAGE
    # Only advice: without support the memory has ordinary pages.
    call(ctypes.c_void_p(x.data_ptr() + start), ctypes.c_size_t(num * width // _HUGE_PAGE * _HUGE_PAGE), mmap.MADV_HUGEPAGE)
    return x[start // width:start // width + num].view(shape)


def apart(like: Tensor, *shape: int) -> Tensor:
    """Return the same outside the heap, for long-lived tensors among short-lived ones."""
    num, width = math.prod(shape), like.element_size()
    if like.device.type != "cpu" or num * width < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return empty(like, *shape)
    block = mmap.mmap(-1, num * width + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(block, dtype=like.dtype)   # keeps the block alive
    start = -x.data_ptr() % _HUGE_PAGE
    # The rest in small pages, to avoid excess memory.
    block.madvise(mmap.MADV_HUGEPAGE, start, num * width // _HUGE_PAGE * _HUGE_PAGE)
    return x[start // width:start // width + num].view(shape)
