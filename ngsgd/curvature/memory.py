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
    num, width = math.prod(shape), like.element_size()
    call = _madvise() if like.device.type == "cpu" and num * width >= _LEAST_BYTES else None
    if call is None:
        return like.new_empty(shape)
    x = like.new_empty(num + _HUGE_PAGE // width)   # so that it can begin with a page; what is not written takes no memory
    start = -x.data_ptr() % _HUGE_PAGE
    # advice: where the kernel does not take it, the memory is what it would have been
    call(ctypes.c_void_p(x.data_ptr() + start), ctypes.c_size_t(num * width // _HUGE_PAGE * _HUGE_PAGE), mmap.MADV_HUGEPAGE)
    return x[start // width:start // width + num].view(shape)
