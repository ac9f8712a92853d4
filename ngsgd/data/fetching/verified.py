"""Verification of files at their first use in a process."""

from __future__ import annotations

import stat
from pathlib import Path

from ngsgd.files import sha256

# path -> (inode, size, time of change) of the file that was verified; the usual ways to replace or
# edit a file change one of these
_VERIFIED: dict[str, tuple[int, int, int]] = {}


def is_sound(path: Path, digest: str) -> bool:
    """Whether a regular file has this SHA-256, which is computed once per process and file."""
    try:
        state = _state(path)
        if state is None or (_VERIFIED.get(str(path.absolute())) != state and sha256(path) != digest):
            return False
    except OSError:
        return False
    _VERIFIED[str(path.absolute())] = state
    return True


def note_sound(path: Path) -> None:
    """Record that the content of a file was verified before it was renamed to `path`."""
    state = _state(path)
    if state is not None:
        _VERIFIED[str(path.absolute())] = state


def _state(path: Path) -> tuple[int, int, int] | None:
    status = path.stat()
    return (status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
