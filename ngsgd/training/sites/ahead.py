"""An exchange between sites in a thread, while the site trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ngsgd.training.parameter_vector import Vector

_POLL_S = 0.02


class Ahead:
    """An exchange that was started; the thread reads and writes objects, and computes no average.

    Args:
        snapshot: parameters of the site at the start.
        outer_iter: the outer iteration after which it was started.
        max_wait_s: maximum time to wait for other sites.
        exchange: makes the requests; its argument takes messages.
    """

    def __init__(self, snapshot: Vector, outer_iter: int, max_wait_s: float,
                 exchange: Callable[[Callable[[str], None]], None]) -> None:
        self.snapshot = snapshot
        self.outer_iter = outer_iter
        self.max_wait_s = max_wait_s
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._error: Exception | None = None
        self._exchange = exchange
        self._thread = threading.Thread(target=self._run, name="ngsgd-sites", daemon=True)
        self._thread.start()

    def wait(self, report: Callable[[str], None]) -> None:
        """Wait for the end; raises the error of the exchange.

        Args:
            report: receives the messages of the thread, in this one.
        """
        is_alive = True
        while is_alive:
            is_alive = self._thread.is_alive()
            try:
                report(self._messages.get(timeout=_POLL_S) if is_alive else self._messages.get_nowait())
                is_alive = True
            except Empty:
                pass
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._exchange(self._messages.put)
        except Exception as error:  # raised by `wait`
            self._error = error
