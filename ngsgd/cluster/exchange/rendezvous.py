"""A key-value store, protected by a secret, in which the members of a group publish addresses.

The TCPStore of torch allows every process that reaches its port to list, read and write all keys.
It also stores any amount of data. Here a connection is closed unless it proves the secret of the
group.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from ngsgd.cluster.exchange.authentication import Channel, RefusedError, accepted, opened
from ngsgd.errors import ClusterError

# operation, seconds to wait, bytes of the key
_REQUEST = struct.Struct("!cdH")
_NUMBER = struct.Struct("!q")
# seconds for a connection to prove the secret
_PROOF_S = 5.0
# concurrent connections, one thread each
_MAX_UNPROVEN = 128
# seconds between two attempts to connect
_PAUSE_S = 0.05
# seconds for the answer that a key did not arrive in time
_SLACK_S = 5.0
_FOUND, _MISSING = b"+", b"-"
# the type stubs lack the names used here
_c10d: Any = torch.distributed
_Store: Any = _c10d.Store


class Rendezvous:
    """The server, in threads of the process of the coordinator.

    Args:
        host: address of this machine that members connect to.
        secret: shared by the members of the group.
        revokes: close all connections when one member disconnects. For NCCL, which does not detect
            over NVLink that a peer is gone. Members of gloo disconnect as soon as they are
            connected to each other.

    Raises:
        ClusterError: the machine cannot listen on `host`.
    """

    def __init__(self, host: str, secret: bytes, *, revokes: bool = False) -> None:
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise ClusterError(
                f"this machine cannot listen on its own address {host} ({error.strerror}), which "
                "the workers need to average among themselves; set "
                "cluster.exchange=object_store.") from error
        self.host, self.secret, self._revokes = host, secret, revokes
        self.port: int = self._listener.getsockname()[1]
        # connections that did not prove the secret
        self.num_refused = 0
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._unproven: set[socket.socket] = set()
        self._proven: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """Whether joining is no longer possible."""
        return self._is_closed

    def close(self) -> None:
        """Close all connections, so that members waiting for a key fail immediately."""
        with self._changed:
            self._is_closed = True
            connections = [self._listener, *self._unproven, *self._proven]
            self._changed.notify_all()
        for connection in connections:
            with contextlib.suppress(OSError):
                # close() alone would leave a thread in accept() or recv()
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # closed, or temporarily out of file descriptors
                time.sleep(_PAUSE_S)
                continue
            with self._changed:
                is_refused = self._is_closed or len(self._unproven) >= _MAX_UNPROVEN
                if is_refused:
                    self.num_refused += 1
                else:
                    self._unproven.add(connection)
            if is_refused:
                connection.close()
            else:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, RefusedError, struct.error):
            channel = self._proven_channel(connection)
            try:
                while not self._is_closed:
                    channel.send(self._answer(channel.receive()))
            finally:
                with self._changed:
                    self._proven.discard(connection)
                if self._revokes:
                    self.close()

    def _proven_channel(self, connection: socket.socket) -> Channel:
        try:
            channel = accepted(connection, self.secret, time.monotonic() + _PROOF_S)
        except (OSError, RefusedError):
            with self._changed:
                self._unproven.discard(connection)
                self.num_refused += not self._is_closed
            raise
        with self._changed:
            self._unproven.discard(connection)
            self._proven.add(connection)
        return channel

    def _answer(self, request: bytes) -> bytes:
        operation, wait_s, length = _REQUEST.unpack_from(request)
        key, value = request[_REQUEST.size:][:length], request[_REQUEST.size + length:]
        with self._changed:
            if operation == b"s":
                self._values[key] = value
            elif operation == b"a":
                value = str(int(self._values.get(key, b"0")) + _NUMBER.unpack(value)[0]).encode()
                self._values[key] = value
            else:
                self._changed.wait_for(lambda: self._is_closed or key in self._values, wait_s)
                return _FOUND + self._values[key] if key in self._values else _MISSING
            self._changed.notify_all()
        return _FOUND + value


class MemberStore(_Store):  # type: ignore[misc]
    """The client of a member, as a Store of torch.distributed."""

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._channel = _connected(host, port, secret, time.monotonic() + timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        self._asked(b"s", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._got(key, self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wait_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + wait_s
        for key in keys:
            self._got(key, max(0.0, deadline - time.monotonic()))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._asked(b"g", key)[:1] == _FOUND for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._asked(b"a", key, _NUMBER.pack(amount))[1:])

    def has_extended_api(self) -> bool:
        return False

    def is_revoked(self) -> bool:
        """Whether the rendezvous was closed, which ends a group that stays connected to it."""
        with self._lock:
            return self._channel.is_closed()

    def close(self) -> None:
        self._channel.close()

    def _got(self, key: str, wait_s: float) -> bytes:
        answer = self._asked(b"g", key, wait_s=wait_s)
        if answer[:1] != _FOUND:
            raise RuntimeError(f"a member of the group did not connect within {wait_s:.1f} s")
        return answer[1:]

    def _asked(self, operation: bytes, key: str, value: bytes = b"", wait_s: float = 0.0) -> bytes:
        name = key.encode()
        try:
            with self._lock:
                self._channel.send(_REQUEST.pack(operation, wait_s, len(name)) + name + value)
                return self._channel.receive(time.monotonic() + wait_s + _SLACK_S)
        except OSError as error:
            raise RuntimeError(f"the rendezvous of the coordinator was closed ({error})") from error


def _connected(host: str, port: int, secret: bytes, deadline: float) -> Channel:
    """Connect, and retry while unauthenticated clients occupy the server."""
    while True:
        try:
            return opened(host, port, secret, min(deadline, time.monotonic() + _PROOF_S))
        except OSError as error:
            if time.monotonic() + _PAUSE_S >= deadline or isinstance(error, ConnectionRefusedError):
                raise RuntimeError(f"the rendezvous of the coordinator at {host}:{port} does not "
                                   f"answer ({error})") from error
            time.sleep(_PAUSE_S)
