"""The identity of a process, which a process id alone does not give: ids are reused, and a file can name any of them.

An identity is a JSON mapping.  It matches a process only if the id, the start time, the boot, the host, the process
namespace and the user are all equal, so that a signal never reaches a stranger.  Start time and boot come from Linux's
/proc; on a system without it no process can be proved to be the one that is meant, and none is signalled.
"""

from __future__ import annotations

import os
import signal as signals
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
_FIELDS = ("host", "boot_id", "pid_namespace", "user", "process_id", "start_time")
# a zombie keeps its id and start time until its parent asks for its exit status
_DEAD = ("Z", "X")


def current() -> dict[str, Any]:
    """The identity of this process, as a file can store it; values that the system does not tell are None."""
    process_id = os.getpid()
    _, start_time = state_and_start_time(process_id)
    return {"host": socket.gethostname(), "boot_id": _boot_id(), "pid_namespace": _pid_namespace(),
            "user": os.getuid(), "process_id": process_id, "start_time": start_time}


def is_complete(identity: Mapping[str, Any]) -> bool:
    """Whether it can be compared at all: files of earlier versions hold only a host and a process id."""
    return (all(identity.get(name) is not None for name in _FIELDS)
            and all(type(identity[name]) is int for name in ("process_id", "start_time", "user"))
            and identity["process_id"] > 1)


def is_here(identity: Mapping[str, Any]) -> bool:
    """Whether it names a process of this machine, boot and namespace, so that `is_alive` can tell its end."""
    return (is_complete(identity) and identity["host"] == socket.gethostname()
            and identity["boot_id"] == _boot_id() and identity["pid_namespace"] == _pid_namespace())


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Whether exactly this process runs on this machine; False also where that cannot be proved."""
    if not is_here(identity):
        return False
    process_id = identity["process_id"]
    state, start_time = state_and_start_time(process_id)
    return (start_time is not None and state not in _DEAD and start_time == identity["start_time"]
            and _user_of(process_id) == identity["user"])


def send_signal(identity: Mapping[str, Any], signal: int) -> bool:
    """Send a signal to exactly this process; False, and nothing is sent, if it is not alive or cannot be proved to be it.

    Raises PermissionError if it is the process of a user whom this one may not signal.
    """
    if not is_alive(identity):
        return False
    handle = _open_handle(identity["process_id"])
    if handle is None:
        # a kernel or sandbox without pidfd_open: microseconds lie between the comparison above and
        # the signal
        return _kill(identity["process_id"], signal)
    try:
        # compared again: only from here on can the id not pass to another process unnoticed
        if not is_alive(identity):
            return False
        signals.pidfd_send_signal(handle, signal)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def exists(process_id: int) -> bool:
    """Whether any process has this id now; no signal is sent."""
    if (PROC / "self").exists():
        state, _ = state_and_start_time(process_id)
        return state not in ("", *_DEAD)
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # of another user
        return True
    return True


def _open_handle(process_id: int) -> int | None:
    try:
        return os.pidfd_open(process_id)
    except (AttributeError, OSError):
        return None


def _kill(process_id: int, signal: int) -> bool:
    try:
        os.kill(process_id, signal)
    except ProcessLookupError:
        return False
    return True


def state_and_start_time(process_id: int) -> tuple[str, int | None]:
    """State letter and start time in clock ticks since boot; ("", None) if there is no such process, or no /proc."""
    try:
        text = (PROC / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace")
        # the second field is the command's name in parentheses, which may itself hold spaces and
        # parentheses
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", None


def _user_of(process_id: int) -> int | None:
    """The real user id of a process."""
    try:
        lines = (PROC / str(process_id) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _boot_id() -> str | None:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _pid_namespace() -> str | None:
    """Containers number their processes on their own: the same id names another process in each."""
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return None
