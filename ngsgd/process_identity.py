"""The identity of a process, for files and signals.

Process ids are reused, and a file can contain any id. An identity therefore matches only if also
start time, boot, host, process namespace and user are equal. Without /proc of Linux no process can
be identified, and no signal is sent.
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
# a zombie keeps its id and start time until its parent reads its exit status
_DEAD = ("Z", "X")


def current() -> dict[str, Any]:
    """Return the identity of this process as JSON values; None for unavailable values."""
    process_id = os.getpid()
    _, start_time = state_and_start_time(process_id)
    return {"host": socket.gethostname(), "boot_id": _boot_id(), "pid_namespace": _pid_namespace(),
            "user": os.getuid(), "process_id": process_id, "start_time": start_time}


def is_complete(identity: Mapping[str, Any]) -> bool:
    """Whether all fields are present and of the right type."""
    return (all(identity.get(name) is not None for name in _FIELDS)
            and all(type(identity[name]) is int for name in ("process_id", "start_time", "user"))
            and identity["process_id"] > 1)


def is_here(identity: Mapping[str, Any]) -> bool:
    """Whether it names a process of this machine, boot and namespace, as `is_alive` requires."""
    return (is_complete(identity) and identity["host"] == socket.gethostname()
            and identity["boot_id"] == _boot_id() and identity["pid_namespace"] == _pid_namespace())


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Whether exactly this process runs on this machine; False if that cannot be proved."""
    if not is_here(identity):
        return False
    process_id = identity["process_id"]
    state, start_time = state_and_start_time(process_id)
    if start_time is None or state in _DEAD or start_time != identity["start_time"]:
        return False
    try:
        status = (PROC / str(process_id) / "status").read_text(encoding="utf-8", errors="replace")
        [user] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:")]
        return bool(user == identity["user"])
    except (OSError, ValueError, IndexError):
        return False


def send_signal(identity: Mapping[str, Any], signal: int) -> bool:
    """Send a signal to exactly this process; False if it is not alive or cannot be identified.

    Raises PermissionError if it belongs to a user whom this one may not signal.
    """
    if not is_alive(identity):
        return False
    try:
        handle = os.pidfd_open(identity["process_id"])
    except (AttributeError, OSError):
        # a kernel or sandbox without it: microseconds pass between the comparison and the signal
        handle = -1
    try:
        if handle < 0:
            os.kill(identity["process_id"], signal)
        # compared again: after opening the handle, reuse of the id by another process is detected
        elif is_alive(identity):
            signals.pidfd_send_signal(handle, signal)
        else:
            return False
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
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
        # process of another user
        return True
    return True


def state_and_start_time(process_id: int) -> tuple[str, int | None]:
    """State letter and start time in clock ticks since boot; ("", None) if unknown."""
    try:
        text = (PROC / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace")
        # the second field, the command name in parentheses, may contain spaces and parentheses
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", None


def _boot_id() -> str | None:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _pid_namespace() -> str | None:
    """Namespace of process ids: containers number their processes independently."""
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return None
