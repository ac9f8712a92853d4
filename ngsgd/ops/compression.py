"""Compression of parameter deltas.

Use codecs for deltas only, parameters minus the model that a job started from: their errors are
relative to a small number, and the next delta includes them (`ngsgd.training.worker`).

| codec  | a row of 2160 elements                          | size of float32 | error of x          |
|--------|-------------------------------------------------|-----------------|---------------------|
| int8   | -127..127, in units of p / 127, and the peak p  | 1/4             | 0.5001 p / 127      |
| sparse | the largest of each 18 elements: its place and  | 1/103           | not larger than x   |
|        | sign, and one magnitude for all of them         |                 |                     |

The peak of a row is its largest magnitude, sent in float32. Both codecs preserve zeros; int8
preserves the peak, too. The error of int8 has 2^-150 more where numbers are subnormal.

The magnitude of sparse is the mean of the largest elements of the groups, weighted by their size.
With the plain mean, the errors of groups with large deltas would grow. An element below half of the
magnitude is not sent, because its error would be larger than the element. Each group is one of 37
numbers: nothing, or one of 18 places with one of two signs. Twelve groups are a word of 64 bits.

Top-k with 2 bits for a value (SparseLoCo, arXiv 2508.15706) sends 1/64 of the elements in as many
bytes. Deltas with earlier errors have no few large elements, so their number counts for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Codec = Literal["int8", "sparse"]
# elements that share a peak or a magnitude; encoded vectors can be divided at multiples of it
ROW_LENGTH = 2160
# elements of which sparse sends at most one
GROUP_LENGTH = 18
# nothing, or a place and a sign
_NUM_CODES = 1 + 2 * GROUP_LENGTH
_GROUPS_PER_WORD = 12
_ROW_BYTES = 8 * ROW_LENGTH // GROUP_LENGTH // _GROUPS_PER_WORD
_POWERS = np.array([_NUM_CODES ** k for k in range(_GROUPS_PER_WORD)], np.uint64)
# rows processed together; temporary copies fit into the cache
_ROWS_AT_ONCE = 16
_INT8 = (np.arange(256, dtype=np.uint8).view(np.int8) / 127.0).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Encoded vector: numbers and raw bytes, without pickled objects."""

    codec: Codec
    # elements
    size: int
    codes: Bytes
    # peak or magnitude of each row
    peaks: Vector

    @property
    def nbytes(self) -> int:
        """Size of codes and peaks in bytes."""
        return self.codes.nbytes + self.peaks.nbytes

    @property
    def ratio(self) -> float:
        """Size relative to the float32 vector; 1 for an empty vector."""
        return self.nbytes / (4 * self.size) if self.size else 1.0


def num_bytes(size: int, codec: Codec) -> tuple[int, int]:
    """Return the bytes of the codes and of the peaks of `size` elements."""
    num_rows = -(-size // ROW_LENGTH)
    return size if codec == "int8" else num_rows * _ROW_BYTES, 4 * num_rows


def encode(vector: Vector, codec: Codec) -> Encoded:
    """Encode a flat, finite float32 vector in a codec; ValueError for another array.

    Example:
        >>> encoded = encode(np.array([0.0, 1.0, -2.5], np.float32), "sparse")
        >>> decode(encoded).tolist(), encoded.nbytes
        ([0.0, 0.0, -2.5], 84)
    """
    if vector.dtype != np.float32 or vector.ndim != 1 or codec not in get_args(Codec):
        raise ValueError(f"a {vector.dtype} array of shape {vector.shape} cannot be encoded in {codec!r}; give a flat float32 "
                         f"vector and one of {', '.join(get_args(Codec))}")
    num_codes, num_peaks = num_bytes(len(vector), codec)
    codes, peaks = np.empty(num_codes, np.uint8), np.empty(num_peaks // 4, np.float32)
    for first in range(0, len(peaks), _ROWS_AT_ONCE):
        part = vector[first * ROW_LENGTH:(first + _ROWS_AT_ONCE) * ROW_LENGTH]
        if not (finite := np.isfinite(part)).all():
            index = int(np.argmin(finite))
            raise ValueError(f"element {first * ROW_LENGTH + index} of {len(vector)} is {part[index]}; only finite numbers can be "
                             "encoded")
        rows = np.zeros((-(-len(part) // ROW_LENGTH), ROW_LENGTH), np.float32)
        rows.reshape(-1)[:len(part)] = part
        some, peaks[first:first + len(rows)] = (_int8_codes if codec == "int8" else _sparse_codes)(rows)
        width = num_codes and some.shape[1]
        codes[first * width:(first + len(rows)) * width] = some.reshape(-1)[:num_codes - first * width]
    return Encoded(codec, len(vector), codes, peaks)


def decode(encoded: Encoded) -> Vector:
    """Return the float32 vector; ValueError for damaged bytes, as far as that can be seen."""
    size, codes, peaks = encoded.size, encoded.codes, encoded.peaks
    num_codes, num_peaks = num_bytes(size, encoded.codec)
    if len(codes) != num_codes or 4 * len(peaks) != num_peaks:
        raise ValueError(f"{len(codes)} bytes and {len(peaks)} peaks are not {size} elements in {encoded.codec}, "
                         f"which take {num_codes} and {num_peaks // 4}")
    if encoded.codec == "int8":
        vector = _INT8[codes]
        vector *= np.repeat(peaks, ROW_LENGTH)[:size]
        return vector
    words = codes.view("<u8").reshape(len(peaks), _ROW_BYTES // 8).astype(np.uint64)
    places, values = [], []
    # row and word of each group
    starts = ROW_LENGTH * np.arange(len(peaks))[:, None] + _GROUPS_PER_WORD * GROUP_LENGTH * np.arange(words.shape[1])
    for number in range(_GROUPS_PER_WORD):
        words, digits = np.divmod(words, np.uint64(_NUM_CODES))
        rows, columns = np.nonzero(digits)
        found = digits[rows, columns].astype(np.int64) - 1
        places.append(starts[rows, columns] + number * GROUP_LENGTH + found // 2)
        values.append(np.where(found % 2, -peaks[rows], peaks[rows]))
    where = np.concatenate(places)
    if words.any() or (where >= size).any():
        raise ValueError(f"the code of {size} elements is damaged")
    vector = np.zeros(size, np.float32)
    vector[where] = np.concatenate(values)
    return vector


def _int8_codes(rows: Vector) -> tuple[Bytes, Vector]:
    peaks = np.abs(rows).max(axis=1)
    # a row of zeros has no peak to divide by
    in_peaks = rows / np.where(peaks > 0.0, peaks, np.float32(1.0))[:, None]
    return np.rint(in_peaks * np.float32(127.0)).astype(np.int8).view(np.uint8), peaks


def _sparse_codes(rows: Vector) -> tuple[Bytes, Vector]:
    groups = rows.reshape(len(rows), -1, GROUP_LENGTH)
    places = np.abs(groups).argmax(axis=2)
    values = np.take_along_axis(groups, places[:, :, None], axis=2)[:, :, 0]
    sizes = np.abs(values).astype(np.float64)
    sums = sizes.sum(axis=1)
    magnitudes = (np.square(sizes).sum(axis=1) / np.where(sums > 0.0, sums, 1.0)).astype(np.float32)
    is_sent = (sizes > 0.0) & (sizes >= 0.5 * magnitudes[:, None])
    digits = np.where(is_sent, 1 + 2 * places + (values < 0.0), 0).astype(np.uint64)
    words = (digits.reshape(len(rows), -1, _GROUPS_PER_WORD) * _POWERS).sum(axis=2, dtype=np.uint64)
    return words.astype("<u8").view(np.uint8), magnitudes
