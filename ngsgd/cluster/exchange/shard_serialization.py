"""Serialization of a result in shards, each with a message authentication code.

Shards end between the rows of the codecs of `ngsgd.ops.compression`, so a result is encoded once
and then divided.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ngsgd.cluster.exchange.authentication import TAG_BYTES, RefusedError, is_tag, tag
from ngsgd.ops.compression import ROW_LENGTH, Codec, Encoded, decode, num_bytes
from ngsgd.training.parameter_vector import Vector

Bytes = npt.NDArray[np.uint8]
# serialized shards are multiples of this many bytes
_WORD = 8


def shard_edges(size: int, count: int) -> list[int]:
    """Offsets of the shards of `size` elements, and the end; rows of a codec are never split.

    Some shards may be empty.
    """
    num_rows = -(-size // ROW_LENGTH)
    return [min(size, num_rows * index // count * ROW_LENGTH) for index in range(count + 1)]


def parcel_size(num_elements: int, codec: Codec | None) -> int:
    """Bytes of a serialized shard of `num_elements` elements."""
    return -(-sum(_raw_sizes(num_elements, codec)) // _WORD) * _WORD + TAG_BYTES


def pack(content: Vector | Encoded, part: slice, parcel: Bytes, key: bytes) -> None:
    """Write one shard of a plain or encoded vector, and its authentication code, to `parcel`.

    `parcel` has `parcel_size` bytes. An empty key writes no code: the part stays in the process.
    """
    raw = [content[part].view(np.uint8)] if isinstance(content, np.ndarray) else _cut(content, part)
    filled, end = sum(map(len, raw)), len(parcel) - TAG_BYTES
    np.concatenate(raw, out=parcel[:filled])
    parcel[filled:end] = 0
    parcel[end:] = np.frombuffer(tag(key, parcel[:end]), np.uint8) if key else 0


def unpack(parcel: Bytes, num_elements: int, codec: Codec | None, key: bytes) -> Vector:
    """Return the elements; raise RefusedError if they differ from those packed with this key."""
    if key and not is_tag(parcel[-TAG_BYTES:].tobytes(), key, parcel[:-TAG_BYTES]):
        raise RefusedError("a part of a result was damaged or forged in transfer")
    if codec is None:
        return parcel[:4 * num_elements].view(np.float32)
    num_codes, num_peaks = _raw_sizes(num_elements, codec)
    codes, peaks = parcel[:num_codes], parcel[num_codes:num_codes + num_peaks].copy().view(np.float32)
    return decode(Encoded(codec, num_elements, codes, peaks))


def _raw_sizes(num_elements: int, codec: Codec | None) -> tuple[int, int]:
    """(bytes of codes or numbers, bytes of peaks)."""
    return (4 * num_elements, 0) if codec is None else num_bytes(num_elements, codec)


def _cut(encoded: Encoded, part: slice) -> list[Bytes]:
    first, first_peak = num_bytes(part.start, encoded.codec)
    stop, last_peak = num_bytes(part.stop, encoded.codec)
    return [encoded.codes[first:stop], encoded.peaks.view(np.uint8)[first_peak:last_peak]]
