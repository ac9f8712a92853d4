"""Compressed files from others, unpacked up to a limit: a small file must not fill the memory."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO

from ngsgd.files import open_regular

ALWAYS_BYTES = 256 << 20    # unpacked content that is accepted however small the file is
MAX_RATIO = 64              # beyond that: unpacked bytes per byte of the file; alignments and JSON have 5 to 25
_CHUNK_BYTES = 1 << 20


class UnpackError(OSError):
    """The content is damaged, or expands beyond the limit; `strerror` is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)

    def __str__(self) -> str:
        return str(self.strerror)


def gunzip(path: Path) -> bytes:
    """The content of a .gz file.

    Raises:
        OSError: it cannot be read or is not a regular file; UnpackError: it is damaged, or expands too much.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        return _unpacked(file, limit(size))


def limit(packed_bytes: int) -> int:
    """How many bytes a compressed file of that size may expand to."""
    return max(ALWAYS_BYTES, MAX_RATIO * packed_bytes)


def _unpacked(file: BinaryIO, most: int) -> bytes:
    content = io.BytesIO()
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            while chunk := packed.read(_CHUNK_BYTES):
                content.write(chunk)
                if content.tell() > most:
                    raise UnpackError(f"it expands to more than {most} bytes")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnpackError(str(error) or "it ends too early") from error
    return content.getvalue()
