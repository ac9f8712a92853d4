"""Decompression of untrusted files up to a limit: a small file must not fill the memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from ngsgd.files import open_regular

ALWAYS_BYTES = 256 << 20  # decompressed size that is accepted for files of any size
# beyond that: decompressed bytes per byte of the file; alignments and JSON have 5 to 25
MAX_RATIO = 64
# of one recording in an archive; those of FSDD and yesno have 0.1 MB
MAX_MEMBER_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
# exceptions of tarfile, zipfile and the decompressors for damaged or hostile content
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError, LookupError,
           RuntimeError, MemoryError)


class UnpackError(OSError):
    """The content is damaged, or expands beyond the limit; `strerror` is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)

    def __str__(self) -> str:
        return str(self.strerror)


def gunzip(path: Path) -> bytes:
    """Return the content of a .gz file. Raises OSError if the file cannot be read or is not a
    regular file. Raises UnpackError if the file is damaged, or expands too much.
    """
    content = io.BytesIO()
    with open_regular(path) as file:
        most = limit(file.seek(0, 2))
        file.seek(0)
        try:
            with gzip.GzipFile(fileobj=file) as packed:
                while chunk := packed.read(_CHUNK_BYTES):
                    content.write(chunk)
                    if content.tell() > most:
                        raise UnpackError(f"it expands to more than {most} bytes")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UnpackError(str(error) or "the file is truncated") from error
    return content.getvalue()


def limit(packed_bytes: int) -> int:
    """Maximum decompressed size of a file of this size."""
    return max(ALWAYS_BYTES, MAX_RATIO * packed_bytes)


def _mapped_member(file: BinaryIO, name: str) -> npt.NDArray[Any]:
    with zipfile.ZipFile(file) as archive, archive.open(name) as packed, tempfile.TemporaryFile() as unpacked:
        version = np.lib.format.read_magic(packed)
        if version != (1, 0):
            raise UnpackError(f"{name} has the version {version} of .npy")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(packed)
        if is_fortran or dtype.hasobject or min(shape, default=0) < 0:
            raise UnpackError(f"{name} is not a plain array")
        shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
        if unpacked.tell() < dtype.itemsize * math.prod(shape):
            raise UnpackError("the file is truncated")
        unpacked.flush()
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        return np.memmap(unpacked, dtype, "r", 0, shape)


def members(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, content) of regular files in a tar or zip archive with the given suffix;
    nothing is written. Raises OSError if the file cannot be read, is damaged, or expands too much.
    """
    try:
        with open_regular(path) as file:
            is_zip = zipfile.is_zipfile(file)
            size = file.seek(0, 2)
            file.seek(0)
            yield from (_of_zip if is_zip else _of_tar)(file, suffix, limit(size))
    except _DAMAGE as error:
        # tarfile lists every format that it tried, one per line
        raise UnpackError(str(error).partition("\n")[0] or "the file is truncated") from error


def _of_zip(file: BinaryIO, suffix: str, left: int) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith(suffix) and not member.is_dir():
                with archive.open(member) as packed:
                    content = _member(packed, member.filename, member.file_size, left)
                left -= len(content)
                yield PurePosixPath(member.filename).name, content


def _of_tar(file: BinaryIO, suffix: str, most: int) -> Iterator[tuple[str, bytes]]:
    head = file.read(6)
    file.seek(0)
    for magic, opened in ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open), (b"]\0\0", lzma.open)):
        if head.startswith(magic):
            file = cast("BinaryIO", opened(file, "rb"))
            break
    with tarfile.open(fileobj=_Bounded(file, most), mode="r:") as archive:  # type: ignore[call-overload]
        for member in archive:
            packed = archive.extractfile(member) if member.name.endswith(suffix) and member.isreg() else None
            if packed is not None:
                yield PurePosixPath(member.name).name, _member(packed, member.name, member.size, most)


def _member(packed: Any, name: str, promised: int, left: int) -> bytes:
    most = min(MAX_MEMBER_BYTES, left)
    content: bytes = packed.read(most + 1) if promised <= most else b""
    if promised > most or len(content) > most:
        raise UnpackError(f"{name[:80]} expands to {max(promised, len(content))} bytes, beyond the limit of "
                          f"{most}")
    return content


class _Bounded:
    """A file with bounded reads for tarfile, whose reads use sizes from untrusted headers."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file, self._most = file, most

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_MEMBER_BYTES + 1:
            raise UnpackError(f"a header in it requests {size} bytes")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset > self._most:
            raise UnpackError(f"it expands to more than {self._most} bytes")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def load_npz(path: Path, *, mapped: Collection[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a .npz file without Python objects; those in `mapped` are mapped from an
    unnamed file. Raises OSError if it cannot be read, is damaged, or expands beyond the limit.
    """
    try:
        with open_regular(path) as file:
            most = limit(file.seek(0, 2))
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                if sum(member.file_size for member in archive.infolist()) > most:
                    raise UnpackError(f"it expands to more than {most} bytes")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files if name not in mapped}
            for name in mapped:
                file.seek(0)
                found[name] = _mapped_member(file, f"{name}.npy")
        # NumPy returns a member that is not an array as bytes
        if foreign := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
            raise UnpackError(f"its member {foreign[0][:80]} is not an array")
        return found
    except (*_DAMAGE, SyntaxError, TypeError) as error:
        raise UnpackError(str(error).partition("\n")[0] or "the file is truncated") from error
