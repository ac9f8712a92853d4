"""The folder of a Ray that a run starts for itself: nobody else on the machine can enter it.

Ray makes its session folder, and the sockets in it, writable for everybody. Nobody reaches them
below a folder of mode 0700.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PREFIX = "ngsgd-ray-"
# sun_path holds 107 bytes; this long is /r/session_DATE_TIME_MICROSECONDS_PID/sockets/plasma_store
_LONGEST_SOCKET, _SESSION_BYTES = 107, 68
_STALE_S = 600.0  # Ray's processes need about a minute to end when their coordinator was killed


class PrivateFolder:
    """Removed by `close`, at the end of the process, or by a later run if it was killed."""

    def __init__(self) -> None:
        base = scratch_folder()
        # folders of this user's runs that were killed
        for lock in Path(base).glob(f"{_PREFIX}*/lock"):
            with contextlib.suppress(OSError):
                about = lock.stat()
                if about.st_uid != os.getuid() or time.time() - about.st_mtime < _STALE_S:
                    continue
                descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
                finally:
                    os.close(descriptor)
        # mkdtemp makes it 0700; Ray opens its own folder below for everybody
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self.temp_dir = str(self.path / "r")
        self.logs = f"{self.temp_dir}/session_latest/logs"
        self._owner = os.getpid()
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(self._at_exit)

    def close(self, *, keep: bool = False) -> None:
        """Removes the folder, or leaves it for a user to read."""
        if self._lock < 0 or self._owner != os.getpid():
            return
        atexit.unregister(self._at_exit)
        if keep:
            # a later run removes folders that have a lock file
            (self.path / "lock").unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _at_exit(self) -> None:
        if self._owner == os.getpid():
            import ray
            with contextlib.suppress(Exception):
                ray.shutdown()
            self.close()


def scratch_folder() -> str:
    """Where Ray would have its folder, unless paths of sockets would become too long there."""
    found = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    # eight random characters follow the prefix
    length = len(os.fsencode(found)) + 1 + len(_PREFIX) + 8 + _SESSION_BYTES
    return found if length <= _LONGEST_SOCKET and Path(found).is_dir() else "/tmp"


_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_KEPT = 1000  # of the lines before the run folder exists


class RayLog(logging.Handler):
    """Receives what Ray logs and prints in this process; keeps it until a file is named."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))
        self._kept: collections.deque[logging.LogRecord] = collections.deque(maxlen=_MAX_KEPT)
        self._file: logging.FileHandler | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep it."""
        if self._file is None:
            self._kept.append(record)
        else:
            # a full disk is reported by whoever writes results
            with contextlib.suppress(OSError, ValueError):
                self._file.emit(record)

    def write_to(self, path: Path) -> None:
        """Write all records to a file from now on; it is made with the first one."""
        if self._file is not None:
            # of a run before this one in the same process
            self._file.close()
        self._file = logging.FileHandler(path, encoding="utf-8", delay=True)
        self._file.setFormatter(self.formatter)
        while self._kept:
            self.emit(self._kept.popleft())


RAY_LOG = RayLog()  # one per process, as Ray itself is


def divert() -> None:
    """Send Ray's log records, and the messages that its driver thread prints, to RAY_LOG."""
    from ray._private import worker
    logger = logging.getLogger("ray")
    if RAY_LOG in logger.handlers:
        return
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(RAY_LOG)
    logger.propagate = False
    # private, and there is no setting: a version without this name prints its messages
    if hasattr(worker, "print_to_stdstream"):
        def log_printed(data: Mapping[str, Any], **_options: Any) -> None:
            for line in data.get("lines", ()):
                logging.getLogger("ray.raylet").error("%s", line)
        worker.print_to_stdstream = log_printed
