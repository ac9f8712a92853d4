"""Message authentication codes, and a socket on which both ends prove that they hold a secret.

They protect against other processes that can reach a port. There is no encryption.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
TAG_BYTES = 16
_SECRET_BYTES = 16   # 128 bits
_NONCE_BYTES = 16
_MAX_MESSAGE = 1 << 26  # the addresses of some thousand members
_LENGTH = struct.Struct("!I")
_COUNT = struct.Struct("!Q")


class RefusedError(RuntimeError):
    """The peer does not hold the secret, or a message was altered in transfer."""


def new_secret() -> bytes:
    """128 random bits."""
    return secrets.token_bytes(_SECRET_BYTES)


def derive(secret: bytes, *parts: bytes | str | int) -> bytes:
    """Derive a key for the purpose named by `parts`; different parts give independent keys."""
    code = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        # with lengths, since otherwise ("ab", "c") and ("a", "bc") would be equal
        code.update(_COUNT.pack(len(content)) + content)
    return code.digest()


def tag(key: bytes, content: bytes | Bytes) -> bytes:
    """Authentication code of a message."""
    return hmac.digest(key, content, hashlib.sha256)[:TAG_BYTES]  # type: ignore[arg-type]


def is_tag(found: bytes, key: bytes, content: bytes | Bytes) -> bool:
    """Whether `found` is the authentication code of a message; constant time for wrong codes."""
    return hmac.compare_digest(found, tag(key, content))


@dataclass
class Channel:
    """Length-prefixed, authenticated messages between two ends that hold the same secret."""

    connection: socket.socket
    send_key: bytes
    receive_key: bytes
    _sent: int = 0
    _received: int = 0

    def send(self, message: bytes) -> None:
        code = derive(self.send_key, _COUNT.pack(self._sent), message)[:TAG_BYTES]
        self._sent += 1
        self.connection.sendall(_LENGTH.pack(len(message)) + message + code)

    def receive(self, deadline: float | None = None) -> bytes:
        """Return the next message; `deadline` is in seconds of time.monotonic()."""
        (length,) = _LENGTH.unpack(_read(self.connection, _LENGTH.size, deadline))
        if length > _MAX_MESSAGE:
            raise RefusedError("a message is too long")
        message = _read(self.connection, length, deadline)
        code = derive(self.receive_key, _COUNT.pack(self._received), message)[:TAG_BYTES]
        if not hmac.compare_digest(_read(self.connection, TAG_BYTES, deadline), code):
            raise RefusedError("a message was altered in transfer")
        self._received += 1
        return message

    def is_closed(self) -> bool:
        """Whether the other end has closed the connection or is gone; never blocks."""
        self.connection.settimeout(0.0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            with contextlib.suppress(OSError):
                self.connection.settimeout(None)

    def close(self) -> None:
        self.connection.close()


def accepted(connection: socket.socket, secret: bytes, deadline: float) -> Channel:
    """Authenticate a client; raise RefusedError, without an answer, if it lacks the secret."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours)
    theirs = _read(connection, _NONCE_BYTES, deadline)
    proof = _read(connection, TAG_BYTES, deadline)
    if not hmac.compare_digest(proof, derive(secret, "client", ours, theirs)[:TAG_BYTES]):
        raise RefusedError("a client does not hold the secret")
    connection.sendall(derive(secret, "server", ours, theirs)[:TAG_BYTES])
    connection.settimeout(None)
    down, up = (derive(secret, name, ours, theirs) for name in ("down", "up"))
    return Channel(connection, send_key=down, receive_key=up)


def opened(host: str, port: int, secret: bytes, deadline: float) -> Channel:
    """Connect to a server; raise RefusedError if it does not hold the secret."""
    connection = socket.create_connection((host, port), timeout=_left(deadline))
    try:
        theirs = _read(connection, _NONCE_BYTES, deadline)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours + derive(secret, "client", theirs, ours)[:TAG_BYTES])
        proof = _read(connection, TAG_BYTES, deadline)
        if not hmac.compare_digest(proof, derive(secret, "server", theirs, ours)[:TAG_BYTES]):
            raise RefusedError(f"{host}:{port} does not hold the secret")
    except BaseException:
        connection.close()
        raise
    down, up = (derive(secret, name, theirs, ours) for name in ("down", "up"))
    return Channel(connection, send_key=up, receive_key=down)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    content = bytearray()
    while len(content) < size:
        # one limit for the complete message: a peer that sends single bytes must not block a thread
        connection.settimeout(None if deadline is None else _left(deadline))
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        content += part
    return bytes(content)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError("the peer did not answer in time")
    return left
