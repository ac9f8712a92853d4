"""Arrays in one safetensors file, written in chunks and read through a memory map.

A file begins with the length of its header (8 bytes, little-endian) and the header, JSON with the
dtype, shape and offsets of each array. The arrays follow. See
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.files import open_regular

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
                                       "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# alignment of the data in bytes: the header is padded with spaces
_ALIGNMENT = 8


class FormatError(Exception):
    """The file has another format, or is truncated."""


def write_arrays(path: Path, first: str, shape: tuple[int, ...], pieces: Iterable[Array], rest: Mapping[str, Array]) -> str:
    """Write the float32 array `first` from chunks, in order, then the arrays of `rest`.

    Only one chunk is in memory at a time. Returns the SHA-256 of the file, which is incomplete
    after an OSError.
    """
    digest = hashlib.sha256()
    layout = {first: (np.dtype("<f4"), shape), **{name: (array.dtype, array.shape) for name, array in rest.items()}}
    entries, begin = {}, 0
    for name, (dtype, size) in layout.items():
        end = begin + dtype.itemsize * math.prod(size)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(size), "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        def write(content: bytes | memoryview) -> None:
            file.write(content)
            digest.update(content)
        write(len(header).to_bytes(8, "little") + header)
        for array in pieces:
            write(_bytes_of(array))
        for array in rest.values():
            write(_bytes_of(array))
    return digest.hexdigest()


class ArrayFile:
    """The arrays of a file by name, memory-mapped: only accessed pages are read."""

    def __init__(self, path: Path, *, is_locked: bool = False) -> None:
        """Map a file, with a shared lock if `is_locked`; FormatError if it is no such file."""
        self.path = path
        with open_regular(path) as file:
            if is_locked:
                # the map has a duplicate of the descriptor, which keeps the lock
                fcntl.flock(file, fcntl.LOCK_SH)
            try:
                # private pages: torch requires writable memory, and writes do not reach the file
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise FormatError("the file is empty") from error
        try:
            length = int.from_bytes(self._map[:8], "little")
            self._entries: dict[str, Any] = json.loads(self._map[8:8 + length])
            self._begin = 8 + length
            end = self._begin + max(int(entry["data_offsets"][1]) for name, entry in self._entries.items()
                                    if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise FormatError(f"its header cannot be read: {error}") from error
        if end > len(self._map):
            raise FormatError(f"it is truncated: {len(self._map)} of {end} bytes")

    def __getitem__(self, name: str) -> Array:
        """Return an array without a copy."""
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        flat = np.frombuffer(self._map, dtype, (end - begin) // dtype.itemsize, self._begin + begin)
        return np.asarray(flat.reshape(entry["shape"]))

    def get(self, name: str) -> Array | None:
        """Return an array, or None if the file does not contain it."""
        return self[name] if name in self._entries else None

    def will_need(self) -> None:
        """Request read-ahead of the file: access is random, but nearly all examples are used."""
        self._map.madvise(mmap.MADV_WILLNEED)


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
