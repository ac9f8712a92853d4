"""Examples in the binary format of Kaldi's nnet3 (NnetExample in an archive), for nnet3-merge-egs and nnet3-train; and back.

    key " " "\\0B" "<Nnet3Eg> <NumIo> " n { "<NnetIo> " name " " "<I1V> " indexes matrix "</NnetIo> " } "</Nnet3Eg> "

Letters: W window of an example with its context, D feature dimension, F frames with a label, P classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ngsgd.errors import DataError
from ngsgd.files import new_file

_ESCAPE = 127       # in place of a time difference: n, t and x follow in full
_MAX_STEP = 124     # of times, in one byte
_COMPRESSED_STEP = np.float32(1.0 / 65535.0)


@dataclass(frozen=True)
class Nnet3Example:
    """Consecutive labelled frames with their context."""

    key: str
    features_WD: npt.NDArray[np.float32]   # from frame -left_context on
    left_context: int
    pdf_F: npt.NDArray[np.int32]           # of frames 0 to F - 1
    weight_F: npt.NDArray[np.float32]
    num_classes: int
    ivector_S: npt.NDArray[np.float32] | None = None   # one for all frames


def write_nnet3_examples(path: Path, examples: Iterable[Nnet3Example]) -> int:
    """Writes an archive and returns how many examples it holds."""
    number = 0
    with new_file(path) as temporary, temporary.open("wb") as file:
        for example in examples:
            file.write(example.key.encode() + b" \0B" + _encoded(example))
            number += 1
    return number


def read_nnet3_examples(path: Path) -> Iterator[Nnet3Example]:
    """The examples of an archive with the inputs and outputs "input" and "output", one sequence each, in order.

    An input "ivector" is read too, others are passed over.  Matrices may be compressed.  Raises DataError for what is no such
    archive.
    """
    with path.open("rb") as file:
        while key := _word(file):
            try:
                yield _decoded(key, file)
            except (struct.error, ValueError, IndexError, KeyError) as error:
                raise DataError(f"{path} cannot be read as an archive of nnet3 examples, at {key[:40]} ({error}); make it "
                                "again.") from error


# Writing --------------------------------------------------------------------------------------------------------------


def _encoded(example: Nnet3Example) -> bytes:
    times = np.arange(len(example.features_WD)) - example.left_context
    matrix = np.ascontiguousarray(example.features_WD, "<f4")
    features = b"FM " + _int(matrix.shape[0]) + _int(matrix.shape[1]) + matrix.tobytes()
    rows = b"".join(b"SV " + _int(example.num_classes) + _int(1) + _int(pdf) + b"\4" + struct.pack("<f", weight)
                    for pdf, weight in zip(example.pdf_F.tolist(), example.weight_F.tolist(), strict=True))
    labels = b"SM " + _int(len(example.pdf_F)) + rows
    parts = [_io("input", times.tolist(), features), _io("output", list(range(len(example.pdf_F))), labels)]
    if example.ivector_S is not None:
        row = np.ascontiguousarray(example.ivector_S, "<f4")
        parts.insert(1, _io("ivector", [0], b"FM " + _int(1) + _int(len(row)) + row.tobytes()))
    return b"<Nnet3Eg> <NumIo> " + _int(len(parts)) + b"".join(parts) + b"</Nnet3Eg> "


def _io(name: str, times: list[int], matrix: bytes) -> bytes:
    indexes, before = b"", 0
    for t in times:
        step = t - before
        indexes += struct.pack("b", step) if abs(step) <= _MAX_STEP else bytes([_ESCAPE]) + _int(0) + _int(t) + _int(0)
        before = t
    return b"<NnetIo> " + name.encode() + b" <I1V> " + _int(len(times)) + indexes + matrix + b"</NnetIo> "


def _int(value: int) -> bytes:
    return b"\4" + struct.pack("<i", value)


# Reading --------------------------------------------------------------------------------------------------------------


def _decoded(key: str, file: BinaryIO) -> Nnet3Example:
    _expect(file, b"\0B")
    _expect(file, b"<Nnet3Eg> <NumIo> ")
    found = {}
    for _ in range(_read_int(file)):
        _expect(file, b"<NnetIo> ")
        name = _word(file)
        times = _read_times(file)
        found[name] = times, _read_matrix(file)
        _expect(file, b"</NnetIo> ")
    _expect(file, b"</Nnet3Eg> ")
    (input_times, features_WD), (output_times, labels) = found["input"], found["output"]
    if not isinstance(features_WD, np.ndarray) or not isinstance(labels, _Sparse):
        raise ValueError("its input is sparse or its output is not")
    if np.any(np.diff(input_times) != 1) or np.any(np.diff(output_times) != 1):
        raise ValueError("its frames have gaps; frames of one sequence are expected")
    ivector = found["ivector"][1] if "ivector" in found else None
    return Nnet3Example(key, features_WD, output_times[0] - input_times[0], labels.column_F, labels.value_F, labels.num_columns,
                        ivector[0] if isinstance(ivector, np.ndarray) else None)


@dataclass(frozen=True)
class _Sparse:
    """A sparse matrix with one element in each row."""

    column_F: npt.NDArray[np.int32]
    value_F: npt.NDArray[np.float32]
    num_columns: int


def _read_times(file: BinaryIO) -> list[int]:
    _expect(file, b"<I1V> ")
    times: list[int] = []
    for _ in range(_read_int(file)):
        [step] = struct.unpack("b", file.read(1))
        if step == _ESCAPE:
            n, t, x = (_read_int(file) for _ in range(3))
            if n or x:
                raise ValueError("it holds several sequences; split it with nnet3-copy-egs before merging")
            times.append(t)
        else:
            times.append((times[-1] if times else 0) + step)
    return times


def _read_matrix(file: BinaryIO) -> npt.NDArray[np.float32] | _Sparse:
    kind = _word(file)
    if kind == "SM":
        return _read_sparse(file)
    if kind in ("FM", "DM"):
        shape = _read_int(file), _read_int(file)
        dtype = np.dtype("<f4" if kind == "FM" else "<f8")
        return np.frombuffer(_bytes(file, shape[0] * shape[1] * dtype.itemsize), dtype).reshape(shape).astype(np.float32)
    if kind in ("CM", "CM2", "CM3"):
        return _read_compressed(file, kind)
    raise ValueError(f"it holds a matrix of the unknown kind {kind!r}")


def _read_sparse(file: BinaryIO) -> _Sparse:
    columns, values, width = [], [], 0
    for _ in range(_read_int(file)):
        _expect(file, b"SV ")
        width = _read_int(file)
        if _read_int(file) != 1:
            raise ValueError("a frame has no single label; soft targets cannot be read")
        columns.append(_read_int(file))
        _expect(file, b"\4")
        values.append(struct.unpack("<f", file.read(4))[0])
    return _Sparse(np.array(columns, np.int32), np.array(values, np.float32), width)


def _read_compressed(file: BinaryIO, kind: str) -> npt.NDArray[np.float32]:
    """Kaldi's CompressedMatrix: 16 bits an element (CM2), 8 bits (CM3), or 8 bits between quantiles of each column (CM)."""
    low, span, rows, columns = struct.unpack("<ffii", _bytes(file, 16))
    if kind != "CM":
        dtype, top = (np.dtype("<u2"), 65535) if kind == "CM2" else (np.dtype("u1"), 255)
        levels = np.frombuffer(_bytes(file, rows * columns * dtype.itemsize), dtype).reshape(rows, columns)
        return np.asarray(np.float32(low) + np.float32(span / top) * levels.astype(np.float32), np.float32)
    quantiles = np.float32(low) + np.float32(span) * _COMPRESSED_STEP * np.frombuffer(_bytes(file, 8 * columns), "<u2").reshape(
        columns, 4).astype(np.float32)
    levels = np.frombuffer(_bytes(file, rows * columns), "u1").reshape(columns, rows).astype(np.float32)
    knots = (0.0, 64.0, 192.0, 255.0)
    return np.stack([np.interp(levels[column], knots, quantiles[column]) for column in range(columns)], axis=1).astype(np.float32)


def _read_int(file: BinaryIO) -> int:
    _expect(file, b"\4")
    return int(struct.unpack("<i", _bytes(file, 4))[0])


def _expect(file: BinaryIO, expected: bytes) -> None:
    if (found := file.read(len(expected))) != expected:
        raise ValueError(f"{expected!r} was expected and {found!r} is there")


def _bytes(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError("it ends too early")
    return content


def _word(file: BinaryIO) -> str:
    """Up to the next space, which is taken too; empty at the end of the file."""
    word = b""
    while (byte := file.read(1)) not in (b"", b" "):
        word += byte
    return word.decode(errors="replace")
