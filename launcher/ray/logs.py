"""Log lines of Ray in this process: to ray.log in the run folder, and never to the terminal.

Ray prints a page of advice when a worker dies, next to our own message on the same death.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# of the lines before the run folder exists
_MAX_KEPT = 1000


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


# one per process, as Ray itself is
RAY_LOG = RayLog()


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
        worker.print_to_stdstream = _log_printed


def _log_printed(data: Mapping[str, Any], **_options: Any) -> None:
    for line in data.get("lines", ()):
        logging.getLogger("ray.raylet").error("%s", line)
