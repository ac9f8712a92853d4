"""Sources of files by their SHA-256: a damaged or malicious index cannot name a path."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ngsgd.errors import ObjectStorageError
from ngsgd.files import sha256
from ngsgd.object_storage.client import ObjectStore

# of the keys in object storage
PREFIX = "archives/"
# below failure.hang_timeout_s, after which a worker without progress is killed
_RETRY_S = 20.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class FetchError(Exception):
    """A source cannot be reached at present; another worker can run the job."""


class UnsoundFileError(Exception):
    """A file is missing at its source, or does not match its checksum."""


class FileSource(Protocol):
    """Files of the coordinator, by SHA-256; small and picklable."""

    @property
    def where(self) -> str:
        """The place, for messages."""

    def size(self, digest: str) -> int | None:
        """Return the number of bytes of a file; None if the source does not have it.

        Raises FetchError if it cannot be reached, and ObjectStorageError if it denies access.
        """

    def parts(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield the content in order, in parts of some megabytes; raises as `size`."""


class StoreSource:
    """Objects below a URL that `ngsgd.data.fetching.files` wrote."""

    def __init__(self, url: str, store: ObjectStore | None = None) -> None:
        self.url = url
        # made in the process that uses it
        self._store = store

    def __reduce__(self) -> tuple[type[StoreSource], tuple[str]]:
        return StoreSource, (self.url,)

    @property
    def where(self) -> str:
        return f"{self.url.rstrip('/')}/{PREFIX}"

    def size(self, digest: str) -> int | None:
        with _retried_elsewhere():
            return self._opened().size(PREFIX + checked_digest(digest))

    def parts(self, digest: str, size: int) -> Iterator[bytes]:
        with _retried_elsewhere():
            yield from self._opened().parts(PREFIX + checked_digest(digest))

    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = ObjectStore(self.url, _RETRY_S)
        return self._store


@contextmanager
def _retried_elsewhere() -> Iterator[None]:
    """Turn an error that another worker may not have into a FetchError."""
    try:
        yield
    except ObjectStorageError as error:
        if error.is_denied:
            raise
        raise FetchError(str(error)) from error


def is_digest(text: object) -> bool:
    """Whether a value of an index is a SHA-256."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def checked_digest(digest: str) -> str:
    """Return a SHA-256 that is part of a path or a key; raises UnsoundFileError for other texts."""
    if not is_digest(digest):
        raise UnsoundFileError(f"the index contains the checksum {digest[:80]!r}, which is no SHA-256")
    return digest


# path -> (inode, size, time of change) of the file that was verified; the usual ways to replace or
# edit a file change one of these
_VERIFIED: dict[str, tuple[int, int, int]] = {}


def is_sound(path: Path, digest: str) -> bool:
    """Whether a regular file has this SHA-256, which is computed once per process and file."""
    try:
        state = _state(path)
        if state is None or (_VERIFIED.get(str(path.absolute())) != state and sha256(path) != digest):
            return False
    except OSError:
        return False
    _VERIFIED[str(path.absolute())] = state
    return True


def note_sound(path: Path) -> None:
    """Record that the content of a file was verified before it was renamed to `path`."""
    state = _state(path)
    if state is not None:
        _VERIFIED[str(path.absolute())] = state


def _state(path: Path) -> tuple[int, int, int] | None:
    status = path.stat()
    return (status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
