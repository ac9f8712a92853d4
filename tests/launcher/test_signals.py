"""Handlers of SIGTERM outside of the outer iterations."""

import os
import signal
from collections.abc import Iterator

import pytest

from ngsgd.launcher.signals import SignalStop, signals_to, sigterm_interrupts


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """Also where pytest itself runs under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sigterm_interrupts_after_a_library_replaced_the_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_interrupts() as install:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        install()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.entry("Lo6", "close the terminal of a run, or end it with SIGHUP", "works",
                   "As SIGTERM: the outer iteration is finished within `failure.grace_period_s`, `error.json` is written, and "
                   "`ngsgd resume` continues. Under `nohup` the signal stays ignored.")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_a_stop(number: signal.Signals) -> None:
    before, said = signal.getsignal(number), list[str]()
    stop = SignalStop(60.0, said.append)
    with signals_to(stop):
        assert not stop.requested()
        signal.raise_signal(number)
        assert stop.requested() and not stop.expired() and stop.signal_name == number.name and len(said) == 1
        signal.raise_signal(number)
        assert stop.expired()
    assert signal.getsignal(number) == before


@pytest.mark.entry("Lo6")
def test_a_hangup_outside_of_the_outer_iterations_interrupts() -> None:
    with sigterm_interrupts(), pytest.raises(KeyboardInterrupt, match="SIGHUP"):
        signal.raise_signal(signal.SIGHUP)


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = SignalStop(60.0, print)
        with signals_to(stop), sigterm_interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
