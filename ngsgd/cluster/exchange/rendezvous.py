"""A key-value store, protected by a secret, in which the members of a group publish addresses.

The TCPStore of torch allows every process that reaches its port to list, read and write all keys.
Gloo asks for the address of each member. Here the first answer has all: 2 N requests of N members.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from ngsgd.cluster.exchange.authentication import RefusedError, accepted, opened
from ngsgd.errors import ClusterError

_REQUEST = struct.Struct("!cdH")  # operation, seconds to wait, bytes of the key
_NUMBER = struct.Struct("!q")
_PROOF_S = 5.0  # seconds for a connection to prove the secret
_MAX_UNPROVEN = 128  # concurrent connections, one thread each
_PAUSE_S = 0.05  # seconds between two attempts to connect
_SLACK_S = 5.0  # seconds for the answer that a key did not arrive in time
_FOUND, _MISSING = b"+", b"-"
_c10d: Any = torch.distributed  # the type stubs lack the names used here
_Store: Any = _c10d.Store


class Rendezvous:
    """The server, in threads of the process of the coordinator, which members reach as `host`.

    With `revokes` it closes all connections when one member disconnects: NCCL does not detect over
    NVLink that a peer is gone. Members of gloo disconnect as soon as they are connected.

    Raises:
        ClusterError: the machine cannot listen on `host`.
    """

    def __init__(self, host: str, secret: bytes, *, revokes: bool = False) -> None:
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise ClusterError(f"this machine cannot listen on its own address {host} ({error.strerror}).") from error
        self.host, self.secret, self._revokes = host, secret, revokes
        self.port: int = self._listener.getsockname()[1]
        self.num_refused = 0  # connections that did not prove the secret
        # prefix, such as "0/" -> values by key
        self._values: dict[bytes, dict[bytes, bytes]] = {}
        # key that a member waits for, or prefix -> number of values under it
        self._awaited: dict[bytes, int] = {}
        self._all: dict[bytes, bytes] = {}  # prefix -> all values, for every member
        self._changed = threading.Condition()
        self._unproven: set[socket.socket] = set()
        self._proven: set[socket.socket] = set()
        self.is_closed = False  # joining is no longer possible
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Close all connections, so that members waiting for a key fail immediately."""
        with self._changed:
            self.is_closed = True
            connections = [self._listener, *self._unproven, *self._proven]
            self._changed.notify_all()
        for connection in connections:
            with contextlib.suppress(OSError):
                # close() alone would leave a thread in accept() or recv()
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while not self.is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # closed, or temporarily out of file descriptors
                time.sleep(_PAUSE_S)
                continue
            with self._changed:
                is_refused = self.is_closed or len(self._unproven) >= _MAX_UNPROVEN
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
            try:
                channel = accepted(connection, self.secret, time.monotonic() + _PROOF_S)
            except (OSError, RefusedError):
                with self._changed:
                    self._unproven.discard(connection)
                    self.num_refused += not self.is_closed
                raise
            with self._changed:
                self._unproven.discard(connection)
                self._proven.add(connection)
            try:
                while not self.is_closed:
                    channel.send(self._answer(channel.receive()))
            finally:
                with self._changed:
                    self._proven.discard(connection)
                if self._revokes:
                    self.close()

    def _answer(self, request: bytes) -> bytes:
        operation, wait_s, length = _REQUEST.unpack_from(request)
        key, value = request[_REQUEST.size:][:length], request[_REQUEST.size + length:]
        prefix = key[:key.rfind(b"/") + 1]
        with self._changed:
            values = self._values.setdefault(prefix, {})
            if operation in (b"g", b"l"):
                count = _NUMBER.unpack(value)[0] if operation == b"l" else 0
                self._awaited[key] = count

                def is_there() -> bool:
                    return len(values) >= count if count else key in values
                self._changed.wait_for(lambda: self.is_closed or is_there(), wait_s)
                if not is_there():
                    return _MISSING
                if count and key not in self._all:
                    text = json.dumps({name.decode(): one.hex() for name, one in values.items()})
                    self._all[key] = zlib.compress(text.encode(), 1)
                return _FOUND + (self._all[key] if count else values[key])
            if operation == b"a":
                value = str(int(values.get(key, b"0")) + _NUMBER.unpack(value)[0]).encode()
            values[key] = value
            # all members would wake for each address
            if key in self._awaited or len(values) == self._awaited.get(prefix):
                self._changed.notify_all()
        return _FOUND + value


class MemberStore(_Store):  # type: ignore[misc]
    """The client of one of `world_size` members, as a Store of torch.distributed."""

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float, world_size: int) -> None:
        super().__init__()
        self._timeout_s, self._world_size = timeout_s, world_size
        self._own_prefix = ""  # under which each member publishes a value by its rank
        self._known: dict[str, bytes] = {}
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            try:
                self._channel = opened(host, port, secret, min(deadline, now + _PROOF_S))
                break
            except OSError as error:
                is_late = time.monotonic() + _PAUSE_S >= deadline
                if is_late or isinstance(error, ConnectionRefusedError):
                    raise RuntimeError(f"the rendezvous of the coordinator at {host}:{port} does not answer ({error})") from error
                # unauthenticated clients occupy the server
                time.sleep(_PAUSE_S)

    def set(self, key: str, value: bytes | str) -> None:
        self._asked(b"s", key, value.encode() if isinstance(value, str) else bytes(value))
        prefix, _, rank = key.rpartition("/")
        if rank.isdecimal():
            self._own_prefix = f"{prefix}/"

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

    def is_revoked(self) -> bool:
        """Whether the rendezvous was closed, which ends a group that stays connected to it."""
        with self._lock:
            return self._channel.is_closed()

    def close(self) -> None:
        self._channel.close()

    def _got(self, key: str, wait_s: float) -> bytes:
        def found(operation: bytes, name: str, value: bytes = b"") -> bytes:
            answer = self._asked(operation, name, value, wait_s)
            if answer[:1] != _FOUND:
                raise RuntimeError(f"a member of the group did not connect within {wait_s:.1f} s")
            return answer[1:]
        if self._own_prefix and not self._known and key.startswith(self._own_prefix):
            text = zlib.decompress(found(b"l", self._own_prefix, _NUMBER.pack(self._world_size)))
            self._known = {name: bytes.fromhex(value) for name, value in json.loads(text).items()}
        return self._known[key] if key in self._known else found(b"g", key)

    def _asked(self, operation: bytes, key: str, value: bytes = b"", wait_s: float = 0.0) -> bytes:
        name = key.encode()
        try:
            with self._lock:
                self._channel.send(_REQUEST.pack(operation, wait_s, len(name)) + name + value)
                return self._channel.receive(time.monotonic() + wait_s + _SLACK_S)
        except OSError as error:
            raise RuntimeError(f"the rendezvous of the coordinator was closed ({error})") from error
