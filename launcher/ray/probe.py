"""Checks before Ray is asked to connect: its version, and whether somebody answers at an address.

Ray itself tries for minutes and writes raw log lines meanwhile; here each check has a time limit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ngsgd.errors import ClusterError, ConfigError, FailureKind
from ngsgd.launcher.console import version

if TYPE_CHECKING:
    from ngsgd.config import ClusterConfig

OLDEST_RAY = (2, 54)  # up to 2.53 the dashboard takes DELETE from strangers: CVE-2026-27482
# of a complete check, name server included: with the imports of a command it ends within 10 s
CHECK_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 2.0
_MAX_ANSWER = 1 << 16
_FRAME = struct.Struct("!HBBBI")  # length (3 bytes), type, flags, stream
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
# the answer SERVING of grpc.health.v1.Health/Check, as a gRPC message
_SERVING = bytes([0, 0, 0, 0, 2, 8, 1])


def require_version() -> None:
    """ConfigError where the installed Ray is too old."""
    installed = version("ray")
    found = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    # without Ray there are no numbers, and its import fails
    if found and found < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise ConfigError(f"Ray {installed} is installed, in which others on the network can delete jobs without a token "
                          f"(CVE-2026-27482); pip install 'ray[default]>={oldest}' on every machine of the cluster.")


def require_cluster(config: ClusterConfig) -> None:
    """What a run on Ray needs, checked before anything else takes time."""
    if config.kind == "ray":
        require_version()
        if config.address:
            require_head(config.address)


def require_head(address: str) -> None:
    """ClusterError unless a Ray head answers at `address`, host:port or auto."""
    found = _resolved(address)
    if found is None:
        # Ray itself reports at once that there is no cluster here
        return
    host, _, port = found.rpartition(":")
    where = found if found == address else f"{found} (cluster.address={address})"
    # a client of ray:// cannot be the coordinator, which shares memory and objects with workers
    if "://" in found or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"the address of the Ray cluster is {where}; cluster.address, or RAY_ADDRESS with auto, must be "
                          "HOST:PORT of its head, such as head:6379. Without Ray: cluster=local.")
    try:
        _limited(lambda: ask_server(host.strip("[]"), int(port)))
    except OSError as error:
        raise ClusterError(f"no Ray head answers at {where} ({_why(error)}); start the head with: ray start --head, and "
                           "check cluster.address.", failure=FailureKind.HEAD) from error


def require_dashboard(address: str) -> None:
    """ClusterError unless an HTTP server answers at `address`, http://host:port."""
    if urlsplit(address).scheme not in ("http", "https"):
        # one of Ray's other kinds of address, which its client resolves
        return
    try:
        _limited(lambda: _get(f"{address.rstrip('/')}/api/version"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Ray job server answers at {address} ({_why(error)}); give the address of its dashboard with "
                           "--dashboard-url http://HEAD:8265.") from error


def _resolved(address: str) -> str | None:
    if address == "local":
        return None
    if address != "auto":
        return address
    given = os.environ.get("RAY_ADDRESS", "")
    if given and given not in ("auto", "local"):
        return given
    with contextlib.suppress(Exception):
        # private, so it may be another one in another version: then Ray looks for itself
        from ray._private import services
        return services.canonicalize_bootstrap_address("auto") or None
    return None


def ask_server(host: str, port: int) -> None:
    """Raise OSError unless a GCS is there and serves, by the health service of gRPC.

    It needs no token. The request is written by hand: a gRPC library in this process would not get
    on with Ray's own, nor with processes that it forks.
    """
    with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() not in ("", "0", "false"):
            return
        headers = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Check",
                   ":authority": f"{host}:{port}"[:100], "te": "trailers", "content-type": "application/grpc"}
        # literal fields without indexing (RFC 7541, 6.2.2): no tables, no compression
        block = b"".join(bytes([0, len(key)]) + key.encode() + bytes([len(value)]) + value.encode()
                         for key, value in headers.items())
        # HTTP/2 (RFC 9113): the preface, empty settings, and one request with an empty message
        request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for *head, content in ((_SETTINGS, 0, 0, b""), (_HEADERS, _END_HEADERS, 1, block), (_DATA, _END_STREAM, 1, bytes(5))):
            request += _FRAME.pack(len(content) >> 8, len(content) & 255, *head) + content
        connection.sendall(request)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        found = b""
        while _SERVING not in found:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(4096)
            found += part
            if not part or len(found) > _MAX_ANSWER:
                raise OSError("another kind of server is there")


def _get(url: str) -> None:
    # here, since the help of commands imports this module
    import ssl
    import urllib.error
    import urllib.request
    try:
        urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        # a server answers; the later request reports why it is rejected
        error.close()
    except urllib.error.URLError as error:
        # who issues certificates here is for Ray's own client to know
        if not isinstance(error.reason, ssl.SSLError):
            raise


def _limited(action: Callable[[], None]) -> None:
    """Does it in a thread, so that nothing it waits for takes longer than the limit."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)
    thread = threading.Thread(target=run, name="probe", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(CHECK_TIMEOUT_S)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {time.monotonic() - began:.0f} s")
    if errors:
        raise errors[0]


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "no answer in time"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason) or type(error).__name__


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
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            self._seen = self._clock()
        except OSError:
            pass
        if self._clock() - self._seen > self._patience_s:
            self.is_lost = True
            atexit.register(_end)
            raise ClusterError(f"the head of the Ray cluster at {self.address} has been gone for "
                               f"{self._clock() - self._seen:.0f} s; start a new cluster, then resume.", failure=FailureKind.HEAD)


def _end() -> None:
    """End the process ahead of Ray's clean-up, which waits for the head and ends it with code 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ClusterError.exit_code)
