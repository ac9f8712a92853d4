"""Ctrl-C, SIGTERM and SIGHUP: the first requests a stop, the second or a timeout stops at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class SignalStop:
    """A stop request, set by a signal; it expires `grace_s` seconds later.

    The time counts while this process is stopped as well. An outer iteration that is given up runs
    again when the run is resumed.
    """

    def __init__(self, grace_s: float, on_request: Callable[[str], None]) -> None:
        self.grace_s = grace_s
        self._on_request = on_request
        self._count = 0
        # the first signal, such as "SIGTERM"; empty before it
        self.signal_name = ""
        self._deadline = float("inf")

    def requested(self) -> bool:
        return self._count > 0

    def expired(self) -> bool:
        return self._count > 1 or time.monotonic() >= self._deadline

    def handle(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            self.signal_name = signal.Signals(signum).name
            self._deadline = time.monotonic() + self.grace_s
            self._on_request(f"{self.signal_name}: finishing this outer iteration for up to "
                             f"{self.grace_s:g} s; a second signal stops at once.")


@contextmanager
def signals_to(stop: SignalStop) -> Iterator[None]:
    """Route SIGINT, SIGTERM and SIGHUP to `stop` while the block runs."""
    old = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, *_requests())}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def _requests() -> tuple[signal.Signals, ...]:
    """Signals besides Ctrl-C that request an end; nohup ignores SIGHUP, which stays so."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def sigterm_interrupts() -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP while the block runs.

    Yields a function that sets the handler again, for after a library has replaced it.
    """
    owner = os.getpid()

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        if os.getpid() != owner:
            # a forked process ends as it would without this handler
            os._exit(128 + signum)
        raise KeyboardInterrupt(signal.Signals(signum).name)

    before = {number: signal.getsignal(number) for number in _requests()}

    def install() -> None:
        for number in before:
            signal.signal(number, interrupt)

    install()
    try:
        yield install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
