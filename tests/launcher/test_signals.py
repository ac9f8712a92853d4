"""Handlers of SIGTERM outside of the outer iterations."""

import signal

import pytest

from ngsgd.launcher.signals import sigterm_interrupts


def test_sigterm_interrupts_after_a_library_replaced_the_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_interrupts() as install:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        install()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
