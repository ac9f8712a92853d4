"""Messages between the coordinator and a worker process; a peer that stops blocks nothing."""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!Q")
_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 20


class Disconnected(Exception):
    """The peer closed its end, or died."""


class Messages:
    """Length-prefixed pickles; both ends are the same program, started by the same user."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Any) -> None:
        """Block until the message is sent; raise Disconnected if the peer is gone."""
        try:
            self.connection.sendall(framed(message))
        except OSError as error:
            raise Disconnected(str(error)) from error

    def post(self, message: Any) -> None:
        """Send as much as the peer accepts now and keep the rest for `flush`; never blocks."""
        self._unsent += framed(message)
        self.flush()

    def flush(self) -> None:
        """Send more of the posted messages; raise Disconnected if the peer is gone."""
        try:
            while self._unsent:
                with memoryview(self._unsent) as unsent:
                    num_sent = self.connection.send(unsent[:_WRITE_BYTES], socket.MSG_DONTWAIT)
                del self._unsent[:num_sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Disconnected(str(error)) from error

    @property
    def has_unsent(self) -> bool:
        """Whether a part of the posted messages is not sent yet."""
        return bool(self._unsent)

    def receive(self) -> Any:
        """Wait for the next message and return it."""
        while (message := self._take()) is None:
            self._read()
        return message[0]

    def arrived(self) -> list[Any]:
        """Return the messages received so far; raise Disconnected if no more can arrive."""
        found: list[Any] = []
        with contextlib.suppress(Disconnected):
            while self._is_readable():
                self._read()
        while (message := self._take()) is not None:
            found.append(message[0])
        if not found and self._is_readable():
            with contextlib.suppress(OSError):
                if self.connection.recv(1, socket.MSG_PEEK):
                    return found
            raise Disconnected
        return found

    def close(self) -> None:
        self.connection.close()

    def _is_readable(self) -> bool:
        # select() supports only the first 1024 descriptors
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))

    def _read(self) -> None:
        try:
            content = self.connection.recv(_READ_BYTES)
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not content:
            raise Disconnected
        self._received += content

    def _take(self) -> tuple[Any] | None:
        """Return one complete message in a tuple, since the message may be None."""
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        if len(self._received) < _HEADER.size + length:
            return None
        content = bytes(self._received[_HEADER.size:_HEADER.size + length])
        del self._received[:_HEADER.size + length]
        return (pickle.loads(content),)


def framed(message: Any) -> bytes:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(content)) + content
