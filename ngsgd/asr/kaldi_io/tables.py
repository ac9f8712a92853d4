"""Kaldi's files: tables of text, archives of matrices and of integer vectors, scripts (.scp) that point into archives."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr import unpacking
from ngsgd.asr.features import cmvn
from ngsgd.data.kaldi_objects import (
    Array,
    KaldiFormatError,
    Place,
    Source,
    open_source,
    parse_place,
    read_archive,
    read_object,
)
from ngsgd.errors import DataError

_MAX_TABLE_BYTES = 1 << 32


@dataclass(frozen=True)
class Entry:
    """What a line of a table says, and where it stands."""

    value: str
    where: str      # file:line


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file:line, text) of every line that is not empty."""
    try:
        text = files.read_regular_text(path, _MAX_TABLE_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; make it, or point data.source at another folder.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); replace it or fix its permissions.") from error
    except UnicodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); convert it.") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"{path}:{number}", line.strip()


def read_table(path: Path) -> dict[str, Entry]:
    """Lines "key value ...", by key in the order of the file; a key that comes twice is an error."""
    table: dict[str, Entry] = {}
    for where, line in read_lines(path):
        key, _, value = line.replace("\t", " ").partition(" ")
        if key in table:
            raise DataError(f"{where}: {key} stands there for the second time, the first is {table[key].where}; remove one.")
        table[key] = Entry(value.strip(), where)
    if not table:
        raise DataError(f"{path} is empty; fill it, or remove its folder.")
    return table


def read_ark(path: Path) -> dict[str, npt.NDArray[np.floating]]:
    """All matrices of an archive by key."""
    try:
        with open_source(path) as source:
            return _by_key(source, 2)
    except (OSError, KaldiFormatError) as error:
        raise DataError(f"{path} cannot be read as an archive of matrices ({_reason(error)}); make it again.") from error


def place_of(entry: Entry) -> Place:
    """The file, offset and range that an entry of a .scp names.  Commands are refused."""
    try:
        return parse_place(entry.value)
    except KaldiFormatError as error:
        raise DataError(f"{entry.where}: {entry.value[:40]!r} {error}; write the archive's name, with its offset and range: "
                        "feats.ark:12[0:19].") from error


def read_matrix(entry: Entry, folder: Path) -> npt.NDArray[np.float32]:
    """The frames that an entry of a .scp points at, "file:offset" or "file:offset[first:last]", as Kaldi counts them.

    A relative path is looked for from here, then from `folder`.
    """
    matrix = _matrix(entry, folder)
    if not len(matrix):
        raise DataError(f"{entry.where}: {entry.value} holds no matrix of frames; point it at features.")
    return np.ascontiguousarray(matrix, dtype=np.float32)


def read_stats(entry: Entry, folder: Path, dim: int) -> cmvn.Stats:
    """Statistics of features, 2 x (dim + 1), that an entry of a cmvn.scp points at."""
    return cmvn.check(_matrix(entry, folder), f"{entry.where}: {entry.value}", dim)


def _matrix(entry: Entry, folder: Path) -> Array:
    place = place_of(entry)
    try:
        with open_source(place.resolve(folder), place.offset) as source:
            found = read_object(source)
        if found.ndim != 2:
            raise KaldiFormatError("it is no matrix")
        return place.part(found)
    except FileNotFoundError as error:
        raise DataError(f"{entry.where}: {place.file} does not exist; correct the path.") from error
    except (OSError, KaldiFormatError, MemoryError) as error:
        raise DataError(f"{entry.where}: {entry.value} cannot be read as a matrix ({_reason(error)}); make it again.") from error


def read_int_vectors(path: Path) -> dict[str, npt.NDArray[np.int32]]:
    """All vectors of an archive of alignments, binary or text, packed by gzip where the name ends in .gz."""
    try:
        content = unpacking.gunzip(path) if path.suffix == ".gz" else files.read_regular_bytes(path, _MAX_TABLE_BYTES)
        source = Source(io.BytesIO(content), len(content))
        if b"\0B" not in content[:4096]:
            content = b"".join(b" ".join(line.split()) + b" \n" for line in content.splitlines() if line.strip())
            source = Source(io.BytesIO(content), len(content))
        return _by_key(source, 1, np.int32)
    except (OSError, KaldiFormatError, MemoryError) as error:
        raise DataError(f"{path} cannot be read as an archive of alignments ({_reason(error)}); make it again.") from error


def _by_key(source: Source, num_dims: int, dtype: type[np.int32] | None = None) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for key, array in read_archive(source):
        if array.ndim != num_dims or (array.dtype == np.int32) != (dtype is np.int32):
            kind = "vector of integers" if dtype is np.int32 else "matrix"
            raise KaldiFormatError(f"{key[:80]}: it is no {kind}")
        if key in found:
            raise KaldiFormatError(f"{key[:80]} stands there twice")
        found[key] = array
    return found


def write_matrices(ark: Path, matrices: Iterable[tuple[str, npt.NDArray[np.floating]]]) -> None:
    """Write an archive of matrices, float64 or float32 as they are, and the script (.scp) that points into it.

    The script has the archive's absolute path, so that it is found from any working directory.
    """
    places = []
    with files.new_file(ark) as temporary, temporary.open("wb") as file:
        for key, matrix in matrices:
            file.write(key.encode() + b" ")
            places.append(f"{key} {ark.absolute()}:{file.tell()}\n")
            file.write(_encoded(matrix))
    files.write_text(ark.with_suffix(".scp"), "".join(places))


def write_matrix(path: Path, matrix: npt.NDArray[np.floating]) -> None:
    """A file of one matrix, such as global_cmvn.stats."""
    with files.new_file(path) as temporary:
        temporary.write_bytes(_encoded(matrix))


def _encoded(matrix: npt.NDArray[np.floating]) -> bytes:
    is_double = matrix.dtype == np.float64
    rows = np.ascontiguousarray(matrix, "<f8" if is_double else "<f4")
    return (b"\0BDM " if is_double else b"\0BFM ") + _int(rows.shape[0]) + _int(rows.shape[1]) + rows.tobytes()


def write_int_vectors(ark: Path, vectors: Iterable[tuple[str, npt.NDArray[np.int32]]]) -> None:
    """An archive of integer vectors, such as alignments."""
    with files.new_file(ark) as temporary, temporary.open("wb") as file:
        for key, vector in vectors:
            packed = np.empty(len(vector), [("size", "u1"), ("value", "<i4")])
            packed["size"], packed["value"] = 4, vector
            file.write(key.encode() + b" \0B" + _int(len(vector)) + packed.tobytes())


def _int(value: int) -> bytes:
    return b"\4" + struct.pack("<i", value)


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
