r"""Reader and writer of examples in the binary format of nnet3 (NnetExample in an archive).

    key " " "\\0B" "<Nnet3Eg> <NumIo> " n { io } "</Nnet3Eg> "
    io: "<NnetIo> " name " " "<I1V> " indexes matrix "</NnetIo> "

Letters: W window of an example with its context, D feature dimension, F frames with a label, P
classes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd.data.kaldi_objects import Source, int32_bytes, matrix_bytes, open_source, read_float_object
from ngsgd.errors import DataError
from ngsgd.files import new_file

# replaces a time difference: n, t and x follow as full integers
_ESCAPE = 127
# maximum time difference in one byte
_MAX_STEP = 124


@dataclass(frozen=True)
class Nnet3Example:
    """Consecutive labeled frames with their context."""

    key: str
    features_WD: npt.NDArray[np.float32]  # from frame -left_context
    left_context: int
    pdf_F: npt.NDArray[np.int32]           # of frames 0 to F - 1
    weight_F: npt.NDArray[np.float32]
    num_classes: int
    ivector_S: npt.NDArray[np.float32] | None = None  # one for all frames


def write_nnet3_examples(path: Path, examples: Iterable[Nnet3Example]) -> int:
    """Write an archive and return its number of examples."""
    number = 0
    with new_file(path) as temporary, temporary.open("wb") as file:
        for example in examples:
            file.write(example.key.encode() + b" \0B" + _encoded(example))
            number += 1
    return number


def read_nnet3_examples(path: Path) -> Iterator[Nnet3Example]:
    """Read the examples of an archive with the inputs and outputs "input" and "output", in order.

    Each has one sequence. An input "ivector" is read too, others are ignored. Raises DataError for
    any other file.
    """
    key = ""
    try:
        with open_source(path) as source:
            while word := source.word():
                key = word.decode(errors="replace")
                yield _decoded(key, source)
    except (OSError, struct.error, ValueError, IndexError, KeyError) as error:
        raise DataError(f"{path} cannot be read as an archive of nnet3 examples, at {key[:40]!r} "
                        f"({error}); create it again with nnet3-get-egs.") from error


def _encoded(example: Nnet3Example) -> bytes:
    times = np.arange(len(example.features_WD)) - example.left_context
    rows = b"".join(b"SV " + int32_bytes(example.num_classes, 1, pdf) + b"\4" + struct.pack("<f", weight)
                    for pdf, weight in zip(example.pdf_F.tolist(), example.weight_F.tolist(), strict=True))
    labels = b"SM " + int32_bytes(len(example.pdf_F)) + rows
    features = matrix_bytes(example.features_WD)
    parts = [_io("input", times.tolist(), features), _io("output", list(range(len(example.pdf_F))), labels)]
    if example.ivector_S is not None:
        parts.insert(1, _io("ivector", [0], matrix_bytes(example.ivector_S[None])))
    return b"<Nnet3Eg> <NumIo> " + int32_bytes(len(parts)) + b"".join(parts) + b"</Nnet3Eg> "


def _io(name: str, times: list[int], matrix: bytes) -> bytes:
    indexes, before = b"", 0
    for t in times:
        step = t - before
        indexes += struct.pack("b", step) if abs(step) <= _MAX_STEP else bytes([_ESCAPE]) + int32_bytes(0, t, 0)
        before = t
    return b"<NnetIo> " + name.encode() + b" <I1V> " + int32_bytes(len(times)) + indexes + matrix + b"</NnetIo> "


def _decoded(key: str, source: Source) -> Nnet3Example:
    source.expect(b"\0B")
    source.expect(b"<Nnet3Eg> <NumIo> ")
    found = {}
    for _ in range(source.int32()):
        source.expect(b"<NnetIo> ")
        name = source.word().decode(errors="replace")
        source.expect(b"<I1V> ")
        times: list[int] = []
        for _ in range(source.int32()):
            [step] = struct.unpack("b", source.take(1))
            if step == _ESCAPE:
                n, t, x = (source.int32() for _ in range(3))
                if n or x:
                    raise ValueError("it holds several sequences; split it with nnet3-copy-egs before merging")
                times.append(t)
            else:
                times.append((times[-1] if times else 0) + step)
        found[name] = times, _read_matrix(source)
        source.expect(b"</NnetIo> ")
    source.expect(b"</Nnet3Eg> ")
    (input_times, features_WD), (output_times, labels) = found["input"], found["output"]
    if not isinstance(features_WD, np.ndarray) or isinstance(labels, np.ndarray):
        raise ValueError("its input is sparse, or its output is dense")
    if np.any(np.diff(input_times) != 1) or np.any(np.diff(output_times) != 1):
        raise ValueError("its frames have gaps; frames of one sequence are expected")
    if (len(input_times), len(output_times)) != (len(features_WD), len(labels[0])):
        raise ValueError("its numbers of rows and times differ")
    ivector = found["ivector"][1] if "ivector" in found else None
    return Nnet3Example(key, features_WD, output_times[0] - input_times[0], *labels,
                        ivector[0] if isinstance(ivector, np.ndarray) else None)


# columns and values of the rows, and the number of columns
_Sparse = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], int]


def _read_matrix(source: Source) -> npt.NDArray[np.float32] | _Sparse:
    if (kind := source.word(16)) != b"SM":
        matrix = read_float_object(source, kind)
        if matrix.ndim != 2:
            raise ValueError("expected a matrix, found a vector")
        return matrix.astype(np.float32, copy=False)
    columns, values, width = [], [], 0
    for _ in range(source.int32()):
        source.expect(b"SV ")
        width = source.int32()
        if source.int32() != 1:
            raise ValueError("a frame has no single label; soft targets are not supported")
        columns.append(source.int32())
        source.expect(b"\4")
        values.append(struct.unpack("<f", source.take(4))[0])
        if not 0 <= columns[-1] < width or not math.isfinite(values[-1]):
            raise ValueError(f"a frame has the label {columns[-1]} of {width} and the weight {values[-1]}")
    return np.array(columns, np.int32), np.array(values, np.float32), width
