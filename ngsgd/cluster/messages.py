"""Messages between the coordinator and a worker process over a socket; a peer that stops in mid-message blocks nobody."""

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
    """The peer has closed its end, or died."""


class Messages:
    """Length-prefixed pickles; both ends are the same program, started by the same user."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Any) -> None:
        """Waits until all of it is on its way; raises Disconnected when nobody reads any more."""
        try:
            self.connection.sendall(framed(message))
        except OSError as error:
            raise Disconnected(str(error)) from error

    def post(self, message: Any) -> None:
        """Sends what the peer can take now and keeps the rest for `flush`: a peer that does not read stops nobody."""
        self._unsent += framed(message)
        self.flush()

    def flush(self) -> None:
        """Sends more of what was posted; raises Disconnected when nobody reads any more."""
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
        """Whether some of what was posted is not on its way yet."""
        return bool(self._unsent)

    def receive(self) -> Any:
        """The next message; waits for it."""
        while (message := self._take()) is None:
            self._read()
        return message[0]

    def arrived(self) -> list[Any]:
        """The messages that are there in full, without waiting; raises Disconnected when no more can come."""
        found: list[Any] = []
        with contextlib.suppress(Disconnected):
            while self._is_readable():
                self._read()
        while (message := self._take()) is not None:
            found.append(message[0])
        if not found and self._is_closed():
            raise Disconnected
        return found

    def close(self) -> None:
        self.connection.close()

    def _is_readable(self) -> bool:
        # select() knows only the first 1024 descriptors
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))

    def _is_closed(self) -> bool:
        if not self._is_readable():
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _read(self) -> None:
        try:
            content = self.connection.recv(_READ_BYTES)
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not content:
            raise Disconnected
        self._received += content

    def _take(self) -> tuple[Any] | None:
        """One whole message, in a tuple: the message itself may be None."""
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
