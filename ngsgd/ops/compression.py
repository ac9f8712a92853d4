"""Compression of parameter deltas, and error feedback that adds the losses to the next delta.

Use codecs for deltas only (parameters minus the broadcast model), not for parameters. A loss is
then relative to a small number, and the next delta includes it.

| codec | element                            | bytes per element | error of x, with row peak p     |
|-------|------------------------------------|-------------------|---------------------------------|
| bf16  | sign, 8-bit exponent, 7-bit        | 2                 | abs(x) / 2^8 + 2^-134           |
|       | mantissa                           |                   |                                 |
| int8  | -127..127, in units of p / 127     | 1 + 4 / row       | 0.5001 p / 127 + 2^-150         |
| e3m0  | sign, 3-bit exponent: 0, p / 64,   | 1/2 + 4 / row     | max(abs(x) / 3, p / 128)        |
|       | p / 32, .., p                      |                   | + 2^-150, with 0.3334 for 1/3   |
| topk  | the 64 largest of 4096: place, and | 120 / 4096, so    | abs(x) if it is not sent        |
|       | sign and one of two magnitudes     | 1/137 of float32  |                                 |

The peak of a row is its largest magnitude, sent in float32. int8 and e3m0 preserve it, and all
codecs preserve zeros. The two magnitudes of topk are means: of the sent elements above their mean
magnitude, and of those below. The error of a row of topk is therefore never longer than the row.

Derivation of the bounds: all codecs round to nearest. bf16 has 8 significant bits, so its numbers
near x are at most abs(x) / 2^7 apart, or 2^-133 below 2^-126. Numbers of int8 are p / 127 apart.
Numbers of e3m0 differ by a factor of two. In the worst case x is midway between 2/3 x and 4/3 x,
or, below p / 64, midway between 0 and p / 64. The last digits are those of float32: two roundings
of 2^-24 in encoding, two in decoding, and 2^-150 if the decoded number is subnormal.

No error of the first three therefore exceeds a fraction c of the peak of its row, c = 0.004, 0.004 and 0.2501. Error
feedback stays bounded: with deltas of at most m, the error stays at most c m / (1 - c), because c
(m + c m / (1 - c)) is the same number.

Sources: error feedback, Seide and others, Interspeech 2014; 4-bit E3M0 deltas, Streaming DiLoCo,
arXiv 2501.18512; 64 of 4096 elements with 2 bits and decaying error feedback, SparseLoCo,
arXiv 2508.15706.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Codec = Literal["bf16", "int8", "e3m0", "topk"]
# Elements that share a peak: 4 bytes for 1024 elements.
ROW_LENGTH = 1024
# Elements of which topk sends NUM_SENT; their places have 12 bits. Encoded vectors can be divided
# at multiples of it.
BLOCK_LENGTH = 4096
NUM_SENT = 64
# bytes of places, and of signs and magnitudes, of a block
_PLACE_BYTES, _SIGN_BYTES = NUM_SENT * 3 // 2, NUM_SENT // 4
# share of the error of topk that the next delta includes
DECAY = 0.95
# Elements processed together (complete rows); temporary copies fit into the cache.
_CHUNK = 1 << 15

# Values of the 4-bit codes, in peaks: a sign bit and 0, 2^-6 .. 2^0. A byte holds two codes, the
# first in the low bits.
_E3M0 = np.array([sign * level for sign in (1.0, -1.0) for level in (0.0, *(2.0 ** (e - 7) for e in range(1, 8)))], np.float32)
# looked up as one number
_E3M0_PAIRS = np.stack([np.tile(_E3M0, 16), np.repeat(_E3M0, 16)], axis=1).view(np.uint64)[:, 0]
_INT8 = (np.arange(256, dtype=np.uint8).view(np.int8) / 127.0).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Encoded vector: numbers and raw bytes, without pickled objects."""

    codec: Codec
    size: int                    # elements
    # length of every row but the last, or of each
    rows: int | tuple[int, ...]
    codes: Bytes
    # one per row; none for bf16; the two magnitudes of each block for topk
    peaks: Vector

    @property
    def nbytes(self) -> int:
        r"""Size of codes and peaks in bytes."""
        return self.codes.nbytes + self.peaks.nbytes

    @property
    def ratio(self) -> float:
        """Size relative to the float32 vector; 1 for an empty vector."""
        return self.nbytes / (4 * self.size) if self.size else 1.0


def encode(vector: Vector, codec: Codec, *, rows: int | Sequence[int] = ROW_LENGTH) -> Encoded:
    """Encode a flat float32 vector.

    Args:
        vector: finite float32 numbers.
        codec: "bf16", "int8", "e3m0" or "topk".
        rows: length of the rows of int8 and e3m0, or the lengths of all of them. Default 1024.

    Raises:
        ValueError: NaN or Inf, row lengths that do not sum to the length of the vector, or another
            type or shape.

    Example:
        >>> encoded = encode(np.array([0.0, 1.0, -2.5], np.float32), "e3m0")
        >>> decode(encoded).tolist(), encoded.nbytes
        ([0.0, 1.25, -2.5], 6)
    """
    if vector.dtype != np.float32 or vector.ndim != 1 or codec not in get_args(Codec):
        raise ValueError(f"a {vector.dtype} array of shape {vector.shape} cannot be encoded in {codec!r}; give a flat float32 "
                         f"vector and one of {', '.join(get_args(Codec))}")
    _require_finite(vector)
    kept_rows = rows if isinstance(rows, int) else tuple(rows)
    if codec == "bf16":
        return Encoded(codec, len(vector), kept_rows, _to_bf16(vector), np.empty(0, np.float32))
    if codec == "topk":
        return Encoded(codec, len(vector), kept_rows, *_largest(vector))
    lengths = _row_lengths(kept_rows, len(vector))
    peaks = np.zeros(len(lengths), np.float32)
    codes = np.zeros(len(vector) + len(vector) % 2, np.uint8)
    quantise = _int8_codes if codec == "int8" else _e3m0_codes
    for group, part in _groups(lengths):
        peaks[group] = _peaks(vector[part], lengths[group])
        # A row of zeros has no peak to divide by.
        divisors = np.where(peaks[group] > 0.0, peaks[group], np.float32(1.0))
        codes[part] = quantise(vector[part] / np.repeat(divisors, lengths[group]))
    return Encoded(codec, len(vector), kept_rows, codes[:len(vector)] if codec == "int8" else _two_to_a_byte(codes), peaks)


def decode(encoded: Encoded) -> Vector:
    """Return the float32 vector; ValueError if the bytes are damaged, as far as that can be seen."""
    size, codes, peaks = encoded.size, encoded.codes, encoded.peaks
    has_rows = encoded.codec in ("int8", "e3m0")
    lengths = _row_lengths(encoded.rows, size) if has_rows else np.empty(0, np.int64)
    num_codes, num_peaks = num_bytes(size, encoded.codec)
    expected = len(lengths) if has_rows else num_peaks // 4
    if len(codes) != num_codes or len(peaks) != expected:
        raise ValueError(f"{len(codes)} bytes and {len(peaks)} peaks are not {size} elements in {encoded.codec}, "
                         f"which take {num_codes} and {expected}")
    if encoded.codec == "bf16":
        return (codes.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if encoded.codec == "topk":
        return _from_largest(codes, peaks, size)
    vector = _INT8[codes] if encoded.codec == "int8" else _E3M0_PAIRS[codes].view(np.float32)[:size]
    for group, part in _groups(lengths):
        vector[part] *= np.repeat(peaks[group], lengths[group])
    return vector


def num_bytes(size: int, codec: Codec) -> tuple[int, int]:
    """Return the bytes of the codes and of the peaks of `size` elements, with rows of ROW_LENGTH."""
    num_blocks, peaks = -(-size // BLOCK_LENGTH), 4 * -(-size // ROW_LENGTH)
    return {"bf16": (2 * size, 0), "int8": (size, peaks), "e3m0": ((size + 1) // 2, peaks),
            "topk": (num_blocks * (_PLACE_BYTES + _SIGN_BYTES), 8 * num_blocks)}[codec]


class ErrorFeedback:
    """Codec of one sender with memory: the loss of a delta is added to the next one.

    Without decay the sum of the sent deltas is the sum of the deltas minus `error`, for any number
    of them; the error of topk decays. Call `reset` if the sender does not continue from its last
    delta, such as a worker that replaces another.
    """

    def __init__(self, codec: Codec, *, rows: int | Sequence[int] = ROW_LENGTH) -> None:
        self.codec: Codec = codec
        self.rows = rows
        # sum over all deltas of delta minus decoded delta; None before the first
        self.error: Vector | None = None

    def encode(self, move: Vector) -> Encoded:
        """Encode the delta plus the error; a rejected delta changes nothing."""
        if self.error is not None and self.error.shape != move.shape:
            raise ValueError(f"a delta of {len(move)} elements follows deltas of "
                             f"{len(self.error)}; call reset() first")
        wanted = move.copy() if self.error is None else add_error(move, self.error, self.codec)
        encoded = encode(wanted, self.codec, rows=self.rows)
        self.error = np.subtract(wanted, decode(encoded), out=wanted)
        return encoded

    def reset(self) -> None:
        """Discard the error."""
        self.error = None


def add_error(move: Vector, error: Vector, codec: Codec) -> Vector:
    """Return the vector to encode: the delta plus the error of the last one, which topk decays."""
    if codec == "topk":
        error = np.multiply(error, np.float32(DECAY))
    return np.add(move, error)


def _largest(vector: Vector) -> tuple[Bytes, Vector]:
    """Return the codes and the magnitudes of the blocks of topk."""
    num_blocks = -(-len(vector) // BLOCK_LENGTH)
    codes = np.empty((num_blocks, _PLACE_BYTES + _SIGN_BYTES), np.uint8)
    peaks = np.empty((num_blocks, 2), np.float32)
    blocks_at_once = _CHUNK // BLOCK_LENGTH
    for first in range(0, num_blocks, blocks_at_once):
        part = vector[first * BLOCK_LENGTH:(first + blocks_at_once) * BLOCK_LENGTH]
        blocks = np.zeros((-(-len(part) // BLOCK_LENGTH), BLOCK_LENGTH), np.float32)
        blocks.reshape(-1)[:len(part)] = part
        group = slice(first, first + len(blocks))
        codes[group], peaks[group] = _largest_of_blocks(blocks)
    return codes.reshape(-1), peaks.reshape(-1)


def _largest_of_blocks(blocks: Vector) -> tuple[Bytes, Vector]:
    size = np.abs(blocks)
    places = np.argpartition(size, -NUM_SENT, axis=1)[:, -NUM_SENT:]
    # equal bytes for equal vectors, whatever the order of a partition is
    places.sort(axis=1)
    sizes = np.take_along_axis(size, places, axis=1)
    # a zero has no code; the largest element is sent again instead, the first one if all are zero
    top = np.take_along_axis(places, sizes.argmax(axis=1)[:, None], axis=1)
    places = np.where(sizes > 0.0, places, top * (sizes.max(axis=1, keepdims=True) > 0.0))
    values = np.take_along_axis(blocks, places, axis=1).astype(np.float64)
    sizes_64 = np.abs(values)
    is_large = sizes_64 > sizes_64.mean(axis=1, keepdims=True)
    num_large = is_large.sum(axis=1)
    large = (sizes_64 * is_large).sum(axis=1)
    peaks = np.stack([(sizes_64.sum(axis=1) - large) / np.maximum(NUM_SENT - num_large, 1),
                      large / np.maximum(num_large, 1)], axis=1)
    pairs = places.astype(np.uint32).reshape(len(blocks), NUM_SENT // 2, 2)
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << 12)
    # three bytes for two places
    in_bytes = packed.astype("<u4").view(np.uint8).reshape(len(blocks), NUM_SENT // 2, 4)[:, :, :3]
    twos = ((values < 0.0).astype(np.uint8) << 1 | is_large).reshape(len(blocks), NUM_SENT // 4, 4)
    signs = (twos << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2, dtype=np.uint8)
    return np.concatenate([in_bytes.reshape(len(blocks), _PLACE_BYTES), signs], axis=1), peaks.astype(np.float32)


def _from_largest(codes: Bytes, peaks: Vector, size: int) -> Vector:
    blocks, magnitudes = codes.reshape(-1, _PLACE_BYTES + _SIGN_BYTES), peaks.reshape(-1, 2)
    in_bytes = blocks[:, :_PLACE_BYTES].reshape(len(blocks), NUM_SENT // 2, 3).astype(np.uint32)
    packed = in_bytes[:, :, 0] | (in_bytes[:, :, 1] << 8) | (in_bytes[:, :, 2] << 16)
    places = np.stack([packed & 0xFFF, packed >> 12], axis=2).reshape(len(blocks), NUM_SENT).astype(np.int64)
    twos = (blocks[:, _PLACE_BYTES:, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(len(blocks), NUM_SENT) & 3
    values = np.take_along_axis(magnitudes, (twos & 1).astype(np.int64), axis=1)
    places += BLOCK_LENGTH * np.arange(len(blocks))[:, None]
    vector = np.zeros(size, np.float32)
    try:
        vector[places.reshape(-1)] = np.where(twos & 2, -values, values).reshape(-1)
    except IndexError as error:
        raise ValueError(f"a place is outside of {size} elements") from error
    return vector


def _to_bf16(vector: Vector) -> Bytes:
    codes = np.empty(len(vector), "<u2")
    for first in range(0, len(vector), _CHUNK):
        part = slice(first, first + _CHUNK)
        bits = vector[part].view(np.uint32)
        # The upper half, plus one if the lower half is larger than half a unit; ties go to even.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        # Rounding up to infinity gives the largest finite number instead.
        codes[part] = rounded - ((rounded & 0x7FFF) == 0x7F80)
    return codes.view(np.uint8)


def _int8_codes(in_peaks: Vector) -> Bytes:
    codes: Bytes = np.rint(in_peaks * np.float32(127.0)).astype(np.int8).view(np.uint8)
    return codes


def _e3m0_codes(in_peaks: Vector) -> Bytes:
    bits = in_peaks.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Adding half a mantissa carries into the exponent from 1.5 on, where the next power of two is
    # nearer.
    exponent = (magnitude + np.uint32(1 << 22)) >> 23
    # 2^-6, with biased exponent 121, is level 1.
    level = np.maximum(exponent, np.uint32(120)) - np.uint32(120)
    # Below it the neighbor is zero, which is nearer only below 2^-7.
    level += (level == 0) & (magnitude >= np.uint32(120 << 23))
    codes: Bytes = (level | ((bits >> 31) << 3)).astype(np.uint8)
    return codes


def _two_to_a_byte(codes: Bytes) -> Bytes:
    pairs = codes.view("<u2")
    # The cast drops the upper byte.
    packed: Bytes = (pairs | (pairs >> 4)).astype(np.uint8)
    return packed


def _peaks(vector: Vector, lengths: npt.NDArray[np.int64]) -> Vector:
    peaks = np.zeros(len(lengths), np.float32)
    # reduceat would give an empty row the first element of the next.
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    if len(starts):
        peaks[filled] = np.maximum.reduceat(np.abs(vector), starts)
    return peaks


def _row_lengths(rows: int | Sequence[int], size: int) -> npt.NDArray[np.int64]:
    if not isinstance(rows, int):
        lengths = np.array(rows, np.int64)
        if lengths.sum() != size or (lengths < 0).any():
            raise ValueError(f"{len(lengths)} rows with {lengths.sum()} elements in total do not "
                             f"match a vector of {size}")
        return lengths
    if rows < 1:
        raise ValueError(f"rows of {rows} elements; a row has at least 1")
    return np.diff(np.append(np.arange(0, size, rows), size)) if size else np.empty(0, np.int64)


def _groups(lengths: npt.NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, elements) of about a chunk each, at least one row."""
    ends = np.cumsum(lengths)
    borders = [0]
    while borders[-1] < len(lengths):
        begin = ends[borders[-1] - 1] if borders[-1] else 0
        borders.append(max(borders[-1] + 1, int(np.searchsorted(ends, begin + _CHUNK, side="right"))))
    for first, stop in pairwise(borders):
        yield slice(first, stop), slice(int(ends[first] - lengths[first]), int(ends[stop - 1]))


def _require_finite(vector: npt.NDArray[Any]) -> None:
    for first in range(0, len(vector), _CHUNK):
        finite = np.isfinite(vector[first:first + _CHUNK])
        if not finite.all():
            index = first + int(np.argmin(finite))
            raise ValueError(f"element {index} of {len(vector)} is {vector[index]}; only finite numbers can be encoded")
