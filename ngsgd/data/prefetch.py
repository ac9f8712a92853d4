"""Prefetching of minibatches in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")

# seconds between two checks whether the reader is still active
_LOOK_S = 0.1


class _End:
    """Sentinel after the last item, with the exception that ended the items, if any."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def ahead(items: Iterator[Item], depth: int) -> Iterator[Item]:
    """Yield the same items in the same order, with up to `depth` of them prepared in advance.

    With `depth` 0 there is no thread. Exceptions of `items` are raised at their position. The
    thread ends when the reader stops reading.
    """
    if not depth:
        yield from items
        return
    ready: queue.Queue[Item | _End] = queue.Queue(depth)
    unwanted = threading.Event()
    thread = threading.Thread(target=_make, args=(items, ready, unwanted), name="ngsgd-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        unwanted.set()
        thread.join()


def _make(items: Iterator[Item], ready: queue.Queue[Item | _End], unwanted: threading.Event) -> None:
    end = _End()
    try:
        for item in items:
            if not _put(ready, item, unwanted):
                return
    except BaseException as error:
        # any exception is passed to the reader
        end = _End(error)
    _put(ready, end, unwanted)


def _put(ready: queue.Queue[Item | _End], item: Item | _End, unwanted: threading.Event) -> bool:
    while not unwanted.is_set():
        try:
            ready.put(item, timeout=_LOOK_S)
            return True
        except queue.Full:
            continue
    return False
