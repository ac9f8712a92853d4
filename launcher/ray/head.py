"""Detects that the head of a Ray cluster is lost.

Ray ends the process of a driver whose head does not come back, without an exception. So the pool
checks the head before it waits, gives up after half the time that Ray allows, and sends the head no
further request.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable

from ngsgd.errors import ClusterError

_RAY_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
# the coordinator waits for no longer; a head in the same network answers in milliseconds
_CONNECT_S = 2.0


class HeadWatch:
    """Asked often, looks now and then: whether the head's port can be reached."""

    def __init__(self, address: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address   # host:port
        self.is_lost = False
        self._clock = clock
        # Ray's own default is 60 s
        self._patience_s = float(os.environ.get(_RAY_PATIENCE, "60")) / 2
        self._seen = self.last_check_s = clock()

    def check(self) -> None:
        """Raises ClusterError once the head has not been there for too long."""
        now = self._clock()
        if now - self.last_check_s < self._patience_s / 5:
            return
        self.last_check_s = now
        if _answers(self.address):
            self._seen = self._clock()
        elif self._clock() - self._seen > self._patience_s:
            self.is_lost = True
            atexit.register(_end)
            raise ClusterError(f"the head of the Ray cluster at {self.address} has been gone for "
                               f"{self._clock() - self._seen:.0f} s; start a new cluster, then resume.")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _end() -> None:
    """Ends the process ahead of Ray's own clean-up, which waits for the head until Ray ends the
    process with code 1.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ClusterError.exit_code)
