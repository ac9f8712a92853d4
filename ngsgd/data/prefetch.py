"""Minibatches made ready by a thread while the last ones are trained on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")

# how often the thread looks whether anybody still reads
_LOOK_S = 0.1


class _End:
    """Stands behind the last item; carries what ended the items early."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def ahead(items: Iterator[Item], depth: int) -> Iterator[Item]:
    """The same items in the same order, up to `depth` of them made in advance; 0: none, and no thread.

    What `items` raises is raised here, at its place.  The thread ends when the reader stops reading.
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
        # whatever it is, it belongs to whoever reads
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
