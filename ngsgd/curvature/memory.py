"""Large results on huge pages.

Memory that is new to the process is handed out page by page, when it is written first: of 100 MB that is 25000 interruptions for
4 KiB each, several times the work of filling it.  With 2 MiB pages, which Linux gives to who asks (`transparent_hugepage` madvise
or always), it is next to nothing.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

_LEAST_BYTES = 1 << 22     # smaller blocks are often used again, and then are not new
_HUGE_PAGE = 1 << 21


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """The system call; None where there are no huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return call


def empty(like: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape, with dtype and device of `like`, whose elements are to be written; on huge pages if it is large."""
    x = like.new_empty(shape)
    size = x.numel() * x.element_size()
    call = _madvise() if x.device.type == "cpu" and size >= _LEAST_BYTES else None
    if call is not None:
        start = -(-x.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        inside = (x.data_ptr() + size - start) // _HUGE_PAGE * _HUGE_PAGE
        # advice: where the kernel does not take it, the memory is what it would have been
        call(ctypes.c_void_p(start), ctypes.c_size_t(inside), mmap.MADV_HUGEPAGE)
    return x
