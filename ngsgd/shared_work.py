"""Work that several processes share on a file system: locks, and directories of results.

A lock ends with its process. On a file system without locks each process works as if it was alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ngsgd.files import make_directories, take_lock

# suffix of locked files
LOCK = ".lock"
# between two tries to lock a file
_POLL_S = 0.05


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Lock a file while the context lasts; the value is False if another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield take_lock(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def turn(path: Path, patience_s: float, flags: int = os.O_RDONLY) -> Iterator[None]:
    """Lock a file or folder, which is opened with these flags. Another process that has locked it
    is waited for, at most `patience_s` seconds.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_s
    try:
        while not take_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def work_directory(path: Path) -> Iterator[Path]:
    """Provide a directory of intermediate results; its files are kept after an error.

    Several processes may use it at once. After success the last of them removes it. Subdirectories
    belong to one process each. Those of killed processes are removed.
    """
    descriptor = _locked_directory(path)
    is_finished = False
    try:
        yield path
        is_finished = True
    finally:
        # unless another process uses it
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_subdirectories(path)
            for left in list(path.iterdir()):
                if is_finished or left.suffix == LOCK:
                    left.unlink()
            # nothing remains of an attempt without results
            path.rmdir()
            path.parent.rmdir()
        os.close(descriptor)


def _remove_subdirectories(path: Path) -> None:
    for left in list(path.iterdir()):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def _locked_directory(path: Path) -> int:
    """Make a directory and return its descriptor with a shared lock."""
    while True:
        make_directories(path)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_subdirectories(path)
            # a file system without locks does not share directories
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            # another process may have removed it before it was locked
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
