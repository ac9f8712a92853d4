"""Decides which sites a round consists of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from queue import Empty, SimpleQueue

from ngsgd.config import SitesConfig
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.sites.contribution import from_bytes
from ngsgd.training.sites.rounds import Closed, Rounds, digest_of

_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0


class RoundCloser:
    """Waits for the contributions of the other sites, and closes rounds.

    A round waits for the sites of the round before it, except those that have finished. Other sites
    are part of it if their contributions are there in time.

    Args:
        rounds: the objects of the exchange.
        sites: the sites.
        layout: of the parameters.
        clock: seconds.
        sleep: waits for some seconds.
    """

    def __init__(self, rounds: Rounds, sites: SitesConfig, layout: FlatLayout, *,
                 clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self.rounds, self.sites, self.layout = rounds, sites, layout
        self.clock, self.sleep = clock, sleep

    def wait(self, number: int, required: Collection[str], max_s: float, check_stop: Callable[[], None],
             on_wait: Callable[[str], None]) -> Closed:
        """Return a round once it is closed, by this or another site.

        Args:
            number: of the round.
            required: the sites of the round before it.
            max_s: seconds after which the round is closed without the sites that are missing.
            check_stop: raises if the run should stop.
            on_wait: receives a message once half of the time is over.
        """
        began, delay, is_told = self.clock(), _FIRST_POLL_S, False
        while True:
            there, closed = self.rounds.state(number, required)
            if closed is not None:
                return closed
            absent = set(required) - there
            if absent and delay > _FIRST_POLL_S:
                absent -= self.rounds.finished()
            if not absent or self.clock() - began > max_s:
                return self._close(number, there)
            check_stop()
            if not is_told and self.clock() - began > max_s / 2:
                is_told = True
                on_wait(f"round {number} of the sites has waited {max_s / 2:.0f} s for {', '.join(sorted(absent))}, and waits "
                        f"up to {max_s / 2:.0f} s more")
            self.sleep(delay)
            delay = min(1.5 * delay, _LAST_POLL_S)

    def _close(self, number: int, there: set[str]) -> Closed:
        digests, rejected = {}, {}
        for site in there & set(self.sites.counts):
            content = self.rounds.contribution(number, site)
            try:
                _, about = from_bytes(content, self.layout)
                if (about.site, about.round) != (site, number):
                    raise ValueError(f"it is of site {about.site} and round {about.round}")
                digests[site] = digest_of(content)
            except ValueError as error:
                rejected[site] = str(error)
        return self.rounds.close(number, digests, rejected)


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
