"""Loaded by the fork server before it forks: a worker ends with the fork server.

This holds from the first instruction of the worker. This module does not import torch, and it has
no effect in any other process that imports it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
_parent = 0


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent, and exit now if the parent is gone already.

    The kernel acts when the thread ends that started this process, also if this one is stopped.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _remember_parent() -> None:
    global _parent  # noqa: PLW0603  the hooks of os.register_at_fork have no other way to share it
    _parent = os.getpid()


# a fork server runs as `python -c`; a test that imports all modules must not change its own forks
if sys.argv[:1] == ["-c"]:
    os.register_at_fork(before=_remember_parent, after_in_child=lambda: die_with_parent(_parent))
