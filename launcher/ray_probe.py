"""Checks before Ray is asked to connect: its version, and whether somebody answers at an address.

Ray itself tries for minutes and writes raw log lines meanwhile; here each check has a time limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from launcher.console import version
from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError, ConfigError

OLDEST_RAY = (2, 54)   # up to 2.53 the dashboard takes DELETE from strangers: CVE-2026-27482
_LIMIT_S = 8.0         # of a whole check: a name server may be slow as well
_CONNECT_S = 4.0
_ANSWER_S = 3.0
# what an HTTP/2 client sends first (RFC 9113, 3.4), and an empty SETTINGS frame; gRPC is HTTP/2
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME = struct.Struct("!3sBBI")   # length, type, flags, stream
_SETTINGS = 4


def require_version() -> None:
    """ConfigError where the installed Ray is too old."""
    installed = version("ray")
    found = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    # without Ray there are no numbers, and its import says so
    if found and found < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise ConfigError(f"Ray {installed} is installed, in which others on the network can delete jobs "
                          f"without a token (CVE-2026-27482); pip install 'ray[default]>={oldest}' on every "
                          "machine of the cluster.")


def require_cluster(config: ClusterConfig) -> None:
    """What a run on Ray needs, checked before anything else takes time."""
    if config.kind == "ray":
        require_version()
        if config.address:
            require_head(config.address)


def require_head(address: str) -> None:
    """ClusterError unless a Ray head answers at `address`: host:port, ray://host:port or auto."""
    found = _resolved(address)
    if found is None:
        # Ray says at once that there is no cluster here
        return
    host, port = _split(found)
    where = found if found == address else f"{found} (cluster.address={address})"
    fix = "start the head with: ray start --head, and check cluster.address"
    try:
        _limited(lambda: _speak(host, port))
    except OSError as error:
        raise ClusterError(f"no Ray head answers at {where} ({_why(error)}); {fix}.") from error


def require_dashboard(address: str) -> None:
    """ClusterError unless an HTTP server answers at `address`, http://host:port."""
    if urlsplit(address).scheme not in ("http", "https"):
        # one of Ray's other kinds of address, which its client resolves
        return
    try:
        _limited(lambda: _get(f"{address.rstrip('/')}/api/version"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Ray job server answers at {address} ({_why(error)}); give the address of its "
                           "dashboard with --address http://HEAD:8265.") from error


def _resolved(address: str) -> str | None:
    if address == "local":
        return None
    if address != "auto":
        return address.removeprefix("ray://")
    given = os.environ.get("RAY_ADDRESS", "")
    if given and given not in ("auto", "local"):
        return given.removeprefix("ray://")
    with contextlib.suppress(Exception):
        # private, so it may be another one in another version: then Ray looks for itself
        from ray._private import services

        return services.canonicalize_bootstrap_address("auto") or None
    return None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"cluster.address is {address}; it must be host:port, ray://host:port or auto.")
    return host.strip("[]"), int(port)


def _speak(host: str, port: int) -> None:
    """Raises OSError unless a gRPC server is there; it answers before it asks who is calling."""
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() not in ("", "0", "false"):
            return
        connection.settimeout(_ANSWER_S)
        connection.sendall(_PREFACE)
        found = b""
        while len(found) < _FRAME.size and (part := connection.recv(_FRAME.size - len(found))):
            found += part
    if len(found) < _FRAME.size or _FRAME.unpack(found)[1] != _SETTINGS:
        raise OSError("another kind of server is there")


def _get(url: str) -> None:
    try:
        urllib.request.urlopen(url, timeout=_CONNECT_S).close()
    except urllib.error.HTTPError as error:
        # an answer all the same: what it refuses is told by the request itself
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
    thread.join(_LIMIT_S)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {time.monotonic() - began:.0f} s")
    if errors:
        raise errors[0]


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "no answer in time"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason) or type(error).__name__
