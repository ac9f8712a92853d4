"""Files of Kaldi: text tables, archives of matrices and integer vectors, scripts (.scp)."""

from __future__ import annotations

import io
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr import unpacking
from ngsgd.asr.features import cmvn
from ngsgd.asr.kaldi_io import lines
from ngsgd.data import kaldi_objects
from ngsgd.data.columns import Index, Spool
from ngsgd.data.kaldi_objects import Array, KaldiFormatError, Place, Source, int32_bytes, matrix_bytes, open_source
from ngsgd.errors import DataError

_MAX_TABLE_BYTES = lines.MAX_BYTES


@dataclass(frozen=True)
class Entry:
    """Value and position of a table line."""

    value: str
    where: str      # file:line


class Table(Mapping[str, Entry]):
    """Lines "key value ..." of a file by key, in its order; 30 bytes of memory per line. Raises
    DataError if the file is missing, damaged or empty, or a key is a duplicate.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._numbers = path, array("q")
        hashes = array("q")

        def records() -> Iterator[bytes]:
            for number, line in lines.numbered(path):
                key, *value = re.split("[ \t]+", line, maxsplit=1)
                self._numbers.append(number)
                hashes.append(hash(key))
                yield " ".join([key, *value]).encode()
        self._lines = Spool(records(), bytes.decode)
        self._index = Index(hashes, lambda at: self._at(at)[0])
        if twice := self._index.duplicate():
            (_, first), (key, entry) = map(self._at, twice)
            raise DataError(f"{entry.where}: {key} is a duplicate, first in {first.where}; remove "
                            "one of them.")
        if not self._lines:
            raise DataError(f"{path} is empty; add lines, or remove its folder.")

    def _at(self, at: int) -> tuple[str, Entry]:
        key, _, value = self._lines[at].partition(" ")
        return key, Entry(value, f"{self._path}:{self._numbers[at]}")

    def __getitem__(self, key: str) -> Entry:
        at = self._index.find(key)
        if at is None:
            raise KeyError(key)
        return self._at(at)[1]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._index.find(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (self._at(at)[0] for at in range(len(self)))

    def __len__(self) -> int:
        return len(self._lines)


def read_ark(path: Path) -> dict[str, npt.NDArray[np.floating]]:
    """Read all matrices of an archive by key."""
    try:
        with open_source(path) as source:
            return _by_key(source, 2)
    except (OSError, KaldiFormatError) as error:
        raise DataError(f"{path} cannot be read as an archive of matrices ({_reason(error)}); create it "
                        "again.") from error


def place_of(entry: Entry) -> Place:
    """Parse the file, offset and range of an entry of a .scp; commands are rejected."""
    try:
        return kaldi_objects.parse_place(entry.value)
    except KaldiFormatError as error:
        raise DataError(f"{entry.where}: {entry.value[:40]!r} {error}; write the name of the "
                        "archive with offset and range: feats.ark:12[0:19].") from error


def read_matrix(entry: Entry, folder: Path) -> npt.NDArray[np.float32]:
    """Read the frames of a .scp entry; relative names start in `folder`."""
    matrix = _matrix(entry, folder)
    if not len(matrix):
        raise DataError(f"{entry.where}: {entry.value} contains no frames; correct the entry.")
    return np.ascontiguousarray(matrix, dtype=np.float32)


def read_stats(entry: Entry, folder: Path, dim: int) -> cmvn.Stats:
    """Read statistics of features, 2 x (dim + 1), of an entry of a cmvn.scp."""
    return cmvn.check(_matrix(entry, folder), f"{entry.where}: {entry.value}", dim)


def _matrix(entry: Entry, folder: Path) -> Array:
    place = place_of(entry)
    try:
        with open_source(place.resolve(folder), place.offset) as source:
            found = kaldi_objects.read_object(source)
        if found.ndim != 2:
            raise KaldiFormatError("it is not a matrix")
        return place.part(found)
    except FileNotFoundError as error:
        raise DataError(f"{entry.where}: {place.resolve(folder)} does not exist; correct "
                        "the path (relative names start in the folder of the table).") from error
    except (OSError, KaldiFormatError, MemoryError) as error:
        raise DataError(f"{entry.where}: {entry.value} cannot be read as a matrix "
                        f"({_reason(error)}); create it again.") from error


def read_int_vectors(path: Path) -> dict[str, npt.NDArray[np.int32]]:
    """Read all vectors of an archive of alignments, binary or text; names in .gz are compressed."""
    try:
        content = unpacking.gunzip(path) if path.suffix == ".gz" else files.read_regular_bytes(path, _MAX_TABLE_BYTES)
        if b"\0B" not in content[:4096] and not kaldi_objects.foreign_kind(content.partition(b" ")[2]):
            content = "".join(f"{' '.join(line.split())} \n" for _, line in lines.read(path)).encode()
        return _by_key(Source(io.BytesIO(content), len(content)), 1, np.int32)
    except (OSError, KaldiFormatError, MemoryError) as error:
        raise DataError(f"{path} cannot be read as an archive of alignments ({_reason(error)}); "
                        "create it again.") from error


def _by_key(source: Source, num_dims: int, dtype: type[np.int32] | None = None) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for key, one in kaldi_objects.read_archive(source):
        if one.ndim != num_dims or (one.dtype == np.int32) != (dtype is np.int32):
            kind = "vector of integers" if dtype is np.int32 else "matrix"
            raise KaldiFormatError(f"{key[:80]}: it is not a {kind}")
        if key in found:
            raise KaldiFormatError(f"duplicate key {key[:80]}")
        found[key] = one
    return found


def write_matrices(ark: Path, matrices: Iterable[tuple[str, npt.NDArray[np.floating]]]) -> None:
    """Write an archive of float64 or float32 matrices, and the .scp with its absolute path."""
    places = []
    with files.new_file(ark) as temporary, temporary.open("wb") as file:
        for key, matrix in matrices:
            file.write(key.encode() + b" ")
            places.append(f"{key} {ark.absolute()}:{file.tell()}\n")
            file.write(b"\0B" + matrix_bytes(matrix))
    files.write_text(ark.with_suffix(".scp"), "".join(places))


def write_matrix(path: Path, matrix: npt.NDArray[np.floating]) -> None:
    """Write a file of one matrix, such as global_cmvn.stats."""
    with files.new_file(path) as temporary:
        temporary.write_bytes(b"\0B" + matrix_bytes(matrix))


def write_int_vectors(ark: Path, vectors: Iterable[tuple[str, npt.NDArray[np.int32]]]) -> None:
    """Write an archive of integer vectors, such as alignments."""
    with files.new_file(ark) as temporary, temporary.open("wb") as file:
        for key, vector in vectors:
            packed = np.empty(len(vector), [("size", "u1"), ("value", "<i4")])
            packed["size"], packed["value"] = 4, vector
            file.write(key.encode() + b" \0B" + int32_bytes(len(vector)) + packed.tobytes())


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
