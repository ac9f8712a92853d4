"""One coordinator per run folder: a lock with a fencing number.

The lock is a kernel lock (flock) on RUN/lock. It ends with its process, so a killed run can be
resumed immediately, also after a restart of the machine. Every holder has a larger fencing number
than the previous holder. Checkpoints and ledger contain that number. On a file system without locks
only the fencing number, which is compared before each commit, stops a superseded coordinator.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ngsgd import interface, process_identity
from ngsgd.errors import CheckpointError, RunLockedError
from ngsgd.files import fsync

# a reader that tests the lock holds it for an instant
_TRIES, _PAUSE_S = 5, 0.1
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# bytes of the file: one write within a page, so that a killed process leaves no mixed content
_SIZE = 2048


class RunLock:
    """Exclusive permission to write to a run folder; a context manager.

    Args:
        path: the lock file.
        purpose: command of the holder, such as "train", for the error of the next process.
        last_fence: the largest known fencing number, if the lock file was removed or damaged.
        warn: receives one message if the file system has no locks.
    """

    def __init__(self, path: Path, purpose: str, last_fence: int = 0, warn: Callable[[str], None] = lambda message: None) -> None:
        self.path = path
        self.purpose = purpose
        self.fence = last_fence
        self._warn = warn
        self._descriptor = -1

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock; raise RunLockedError immediately if a living process holds it."""
        is_new = not self.path.exists()
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o644)
            try:
                self._take()
                self.fence = 1 + max(self.fence, _fence_in(_read(self._descriptor)))
                self._write({"fence": self.fence, "purpose": self.purpose, "since": time.time(),
                             "holder": process_identity.current()})
                if is_new:
                    fsync(self.path.parent)
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be locked ({error.strerror}), so nothing is written to the run; "
                                  f"free disk space, or fix the permissions of {self.path.parent}.") from error

    def release(self) -> None:
        """Release the lock; the fencing number stays in the file."""
        # release the lock even if the disk is full
        with contextlib.suppress(OSError):
            self._write({"fence": self.fence})
        os.close(self._descriptor)

    def require_held(self) -> None:
        """Raise RunLockedError if another process has taken the lock since."""
        with contextlib.suppress(FileNotFoundError):
            now = _fence_in(read_lock(self.path))
            if now <= self.fence:
                return
            raise RunLockedError(f"{self.path.parent} was taken over by another process (fencing number {now}, this process "
                                 f"has {self.fence}); this process stops writing. Follow the run with: ngsgd status "
                                 f"{self.path.parent}")
        raise RunLockedError(f"{self.path} was removed while this process held it; this process "
                             f"stops writing. Resume the run with: {interface.resume(self.path.parent)}")

    def committed(self) -> None:
        """Called after each commit; a lock of a run in object storage publishes it."""

    def stop_requested(self) -> bool:
        """Whether another machine asked this process to stop; only for runs in object storage."""
        return False

    def _take(self) -> None:
        for last in (*(False,) * (_TRIES - 1), True):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if last:
                    raise RunLockedError(_refusal(self.path, _read(self._descriptor))) from None
                time.sleep(_PAUSE_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                holder = _read(self._descriptor)
                if process_identity.is_alive(_holder_of(holder)):
                    raise RunLockedError(_refusal(self.path, holder)) from None
                self._warn(f"the file system of {self.path.parent} has no locks; do not start a second process on this run")
                return

    def _write(self, content: Mapping[str, Any]) -> None:
        # in place: the kernel lock belongs to this file
        os.pwrite(self._descriptor, json.dumps(content).encode().ljust(_SIZE - 1) + b"\n", 0)
        os.fsync(self._descriptor)


def holder_of(path: Path) -> dict[str, Any] | None:
    """Return the content of a lock that a living process, its "holder", holds, else None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read(descriptor)
    except OSError:
        # no locks here: the identity alone decides
        content = _read(descriptor)
        return content if process_identity.is_alive(_holder_of(content)) else None
    finally:
        os.close(descriptor)


def read_lock(path: Path) -> dict[str, Any]:
    """Return the content of a lock file, empty if it is damaged; raise OSError without a file."""
    descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, _SIZE, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _fence_in(content: Mapping[str, Any]) -> int:
    fence = content.get("fence")
    return fence if type(fence) is int and fence > 0 else 0


def _holder_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    holder = content.get("holder")
    return holder if isinstance(holder, dict) else {}


def _refusal(path: Path, content: Mapping[str, Any]) -> str:
    holder = _holder_of(content)
    who = f"process {holder.get('process_id')} on {holder.get('host')}" if holder else "another process"
    return (f"{path.parent} is in use by {who} (ngsgd {content.get('purpose', 'train')}); wait "
            f"until it ends, or end it with: ngsgd stop {path.parent}")
