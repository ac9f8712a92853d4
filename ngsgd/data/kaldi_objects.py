"""Kaldi objects in binary and text form: matrices, compressed matrices, vectors, int32 vectors.

Only these are read. Pipes and pickles, which other readers execute, are rejected, and each size in
a header is compared with the remaining bytes before memory is allocated.

    place = parse_place("feats.ark:12[0:19,3:5]")   # file, offset, rows and columns
    with open_object(path, place) as source:
        matrix = place.part(read_object(source))
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ngsgd.files import named_in, open_regular

Array = npt.NDArray[Any]

# magic numbers of other formats; kaldiio reads the first five, and unpickles the first
_FOREIGN = {b"PKL": "a Python pickle", b"NPY": "a NumPy array of kaldiio",
            b"AUDIO": "audio of kaldiio", b"RIFF": "wav audio", b"fLaC": "flac audio",
            b"\x93NUMPY": "a NumPy file", b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "gzip data",
            b"\x80": "a Python pickle"}
_LONGEST_KEY = 4096
# Kaldi allows a row range to end up to this many rows after the last row
_MAX_BEYOND = 3
# 1/65535, with the digits of the Kaldi source
_PER_LEVEL_16 = np.float32(1.52590218966964e-05)
_INT_VECTOR = np.dtype([("size", "u1"), ("value", "<i4")])


class KaldiFormatError(ValueError):
    """The content is not a supported Kaldi object; the message is the reason."""


class Source:
    """A file of known size, so that no read can exceed it."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    @property
    def left(self) -> int:
        return self._size - self._file.tell()

    @property
    def position(self) -> int:
        return self._file.tell()

    def seek(self, offset: int) -> None:
        if offset > self._size:
            raise KaldiFormatError(f"the file has {self._size} bytes, but the offset is {offset}")
        self._file.seek(offset)

    def peek(self, size: int) -> bytes:
        content = self._file.read(size)
        self._file.seek(-len(content), 1)
        return content

    def take(self, size: int) -> bytes:
        """Read a few bytes of a header."""
        content = self._file.read(size)
        if len(content) != size:
            raise KaldiFormatError("the file is truncated")
        return content

    def array(self, dtype: npt.DTypeLike, *shape: int) -> Array:
        """Read an array; the size is checked before memory is allocated."""
        kind = np.dtype(dtype)
        if min(shape) < 0 or (len(shape) > 1 and (shape[0] == 0) != (shape[1] == 0)):
            raise KaldiFormatError(f"its header has the invalid size {' x '.join(map(str, shape))}")
        size = kind.itemsize * math.prod(shape)
        if not 0 <= size <= self.left:
            raise KaldiFormatError(f"its header requires {size} bytes, but only {self.left} follow")
        found = np.empty(shape, kind)
        if size and self._file.readinto(found.reshape(-1).view(np.uint8)) != size:  # type: ignore[attr-defined]
            raise KaldiFormatError("the file is truncated")
        return found

    def int32(self) -> int:
        """Read an integer with its preceding size byte."""
        content = self.take(5)
        if content[0] != 4:
            raise KaldiFormatError(f"expected a 4-byte integer, but the size byte is {content[0]}")
        return int.from_bytes(content[1:], "little", signed=True)

    def word(self, longest: int = _LONGEST_KEY) -> bytes:
        """Read a word and the space after it; empty at the end of the file."""
        content = self._file.read(64)
        while (end := content.find(b" ")) < 0:
            more = self._file.read(longest)
            if len(content) > longest or not more:
                if not content.strip():
                    return b""
                raise KaldiFormatError(f"the word {content[:40]!r} does not end with a space")
            content += more
        self._file.seek(end + 1 - len(content), 1)
        return content[:end]

    def line(self) -> bytes:
        return self._file.readline()

    def expect(self, expected: bytes) -> None:
        if (found := self._file.read(len(expected))) != expected:
            raise KaldiFormatError(f"expected {expected!r}, found {found!r}")


@dataclass(frozen=True)
class Place:
    """Target of a .scp entry: a file, optionally an offset and ranges of rows and columns."""

    file: str
    offset: int = 0
    rows: tuple[int, int] | None = None  # first and last index, from 0
    columns: tuple[int, int] | None = None

    def resolve(self, folder: Path) -> Path:
        """Path of the file; a relative name starts in `folder`."""
        return named_in(folder, self.file)

    def part(self, matrix: Array) -> Array:
        """Slice the ranges from the matrix."""
        if self.rows is None and self.columns is None:
            return matrix
        if matrix.ndim != 2:
            raise KaldiFormatError("a range requires a matrix, but this is a vector")
        return matrix[_slice(self.rows, len(matrix), "rows", _MAX_BEYOND), _slice(self.columns, matrix.shape[1], "columns", 0)]


def parse_place(value: str) -> Place:
    """Parse the second field of a line of a .scp, such as `feats.ark:12[0:19,3:5]`.

    Raises KaldiFormatError for a command, standard input, or a range that cannot be parsed.
    """
    file = value = value.strip()
    ranges: list[str] = []
    if value.endswith("]") and "[" in value:
        file, _, inside = value[:-1].rpartition("[")
        ranges = inside.split(",")
    if value.startswith("|") or file.rstrip().endswith("|"):
        raise KaldiFormatError("is a command, which ngsgd never runs from data files; write the data to a file")
    if len(ranges) > 2:
        raise KaldiFormatError("has a range with more than rows and columns")
    rows, columns = (_range(text) for text in [*ranges, ":", ":"][:2])
    name, colon, offset = file.rpartition(":")
    has_offset = bool(colon) and offset.isascii() and offset.isdigit() and len(offset) < 19
    file = name if has_offset else file
    if file in ("", "-"):
        raise KaldiFormatError("is standard input, which is not supported; name a file")
    if "\0" in file:
        raise KaldiFormatError("has a zero byte in the file name")
    return Place(file, int(offset) if has_offset else 0, rows, columns)


def _range(text: str) -> tuple[int, int] | None:
    if text == ":":
        return None
    match = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if not match or int(match[1]) > int(match[2]):
        raise KaldiFormatError(f"has the invalid range [{text}]; expected first:last, counted from 0")
    return int(match[1]), int(match[2])


def _slice(ends: tuple[int, int] | None, size: int, what: str, beyond: int) -> slice:
    if ends is None:
        return slice(None)
    first, last = ends
    if first >= size or last >= size + beyond:
        raise KaldiFormatError(f"the range {first}:{last} exceeds its {size} {what}")
    return slice(first, min(last, size - 1) + 1)


@contextmanager
def open_source(path: Path, offset: int = 0) -> Iterator[Source]:
    """Open a regular file at an offset; raise OSError for FIFOs and devices."""
    with open_regular(path) as file:
        source = Source(file, os.fstat(file.fileno()).st_size)
        if offset:
            source.seek(offset)
        yield source


def read_object(source: Source) -> Array:
    """Read a float matrix or vector, or int32 vector, writable; KaldiFormatError for others."""
    head = source.peek(6)
    if not head.startswith(b"\0B"):
        if kind := foreign_kind(head):
            raise KaldiFormatError(f"is {kind}, which is not read from Kaldi archives")
        return _read_text(source)
    source.take(2)
    if head[2:3] == b"\4":
        packed = source.array(_INT_VECTOR, source.int32())
        if not (packed["size"] == 4).all():
            raise KaldiFormatError("is not a vector of 4-byte integers")
        return np.ascontiguousarray(packed["value"])
    return read_float_object(source, source.word(16))


def foreign_kind(content: bytes) -> str | None:
    """Return the name of the format of another tool that an object begins with; None for others."""
    return next((kind for magic, kind in _FOREIGN.items() if content.startswith(magic)), None)


def read_float_object(source: Source, kind: bytes) -> Array:
    """Read a matrix or vector whose type word, such as `FM`, has been read."""
    dtype = {b"F": "<f4", b"D": "<f8"}.get(kind[:1])
    if dtype and kind[1:] == b"M":
        return source.array(dtype, source.int32(), source.int32())
    if dtype and kind[1:] == b"V":
        return source.array(dtype, source.int32())
    if kind in (b"CM", b"CM2", b"CM3"):
        return _read_compressed(source, kind)
    raise KaldiFormatError(f"has the unsupported type {kind[:16]!r}")


def read_archive(source: Source) -> Iterator[tuple[str, Array]]:
    """Yield (key, object) for every entry of a binary or text archive."""
    while key := source.word():
        name = key.strip().decode("utf-8", errors="replace")
        try:
            yield name, read_object(source)
        except KaldiFormatError as error:
            raise KaldiFormatError(f"{name[:80]}: {error}") from error


def int32_bytes(*values: int) -> bytes:
    """Encode integers as `Source.int32` reads them."""
    return b"".join(struct.pack("<bi", 4, value) for value in values)


def matrix_bytes(matrix: npt.NDArray[np.floating]) -> bytes:
    """Encode a matrix with its type word: float64, or float32 for other types."""
    word, dtype = (b"DM ", "<f8") if matrix.dtype == np.float64 else (b"FM ", "<f4")
    rows = np.ascontiguousarray(matrix, dtype)
    return word + int32_bytes(*rows.shape) + rows.tobytes()


def _read_compressed(source: Source, kind: bytes) -> Array:
    """Decompress a CompressedMatrix in the order of operations of Kaldi, bitwise identical to it.

    CM2 has 16 bits per element, CM3 has 8, CM has 8 bits between four quantiles of each column.
    """
    low, span, num_rows, num_columns = struct.unpack("<ffii", source.take(16))
    if not (np.isfinite(low) and np.isfinite(span)):
        raise KaldiFormatError("is compressed with a range that is not finite")
    if min(num_rows, num_columns) < 0 or (num_rows == 0) != (num_columns == 0):
        raise KaldiFormatError(f"its header has the invalid size {num_rows} x {num_columns}")
    if kind != b"CM":
        dtype, top = ("<u2", 65535.0) if kind == b"CM2" else ("u1", 255.0)
        # in double precision, as in Kaldi
        step = np.float32(span * (1.0 / top))
        return np.float32(low) + source.array(dtype, num_rows, num_columns).astype(np.float32) * step
    if not num_rows:
        return np.empty((0, 0), np.float32)
    levels_D4 = source.array("<u2", num_columns, 4).astype(np.float32)
    quantile_D4 = np.float32(low) + np.float32(span) * _PER_LEVEL_16 * levels_D4
    level_DT = source.array("u1", num_columns, num_rows)
    # D x 256: values between the quantiles at levels 0, 64, 192 and 255
    found = np.empty((len(quantile_D4), 256), np.float32)
    for begin, end, at in ((0, 64, 0), (64, 192, 1), (192, 255, 2)):
        level = np.arange(begin, end + 1, dtype=np.float32) - np.float32(begin)
        span_D1 = (quantile_D4[:, at + 1] - quantile_D4[:, at])[:, None]
        # Kaldi multiplies the span by the level in float, then scales and adds in double
        value = quantile_D4[:, at][:, None] + (span_D1 * level).astype(np.float64) * (1.0 / (end - begin))
        # the quantile in the middle belongs to the part before it
        first = begin + 1 if begin else 0
        found[:, first:end + 1] = value[:, first - begin:]
    return np.ascontiguousarray(np.take_along_axis(found, level_DT, axis=1).T)


def _read_text(source: Source) -> Array:
    """Read a line of integers, or numbers in brackets: one line is a vector, more are a matrix."""
    line = source.line()
    if not line.lstrip().startswith(b"["):
        return _numbers(line, np.int32)
    rows = [line.lstrip()[1:]]
    while b"]" not in rows[-1]:
        if not (line := source.line()):
            raise KaldiFormatError("the bracket ] is missing")
        rows.append(line)
    rows[-1], _, rest = rows[-1].partition(b"]")
    if rest.strip():
        raise KaldiFormatError(f"{rest.strip()[:20]!r} follows the bracket ]")
    if len(rows) == 1:
        return _numbers(rows[0], np.float32)
    found = [_numbers(row, np.float32) for row in rows if row.strip()]
    if len({len(row) for row in found}) > 1:
        raise KaldiFormatError("its rows have different lengths")
    return np.stack(found) if found else np.empty((0, 0), np.float32)


def _numbers(line: bytes, dtype: type[np.float32] | type[np.int32]) -> Array:
    try:
        fields = line.decode("ascii").split()
        # reject the digit separator of Python, which Kaldi does not support
        if "_" in line.decode("ascii"):
            raise ValueError("_ in a number")
        wide = np.array(fields, np.float64 if dtype is np.float32 else np.int64)
    except (ValueError, OverflowError) as error:
        raise KaldiFormatError(f"{line[:40]!r} does not consist of numbers in the text form of Kaldi") from error
    if dtype is np.int32 and len(wide) and (wide.min() < -2**31 or wide.max() >= 2**31):
        raise KaldiFormatError(f"{line[:40]!r} has an integer beyond 32 bits")
    with np.errstate(over="ignore"):
        return wide.astype(dtype)
