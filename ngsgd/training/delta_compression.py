"""Compression of the parameter delta of a job, with the error of the previous job of its slot.

A job with a codec starts from the model + e, where e is the part of the slot's last delta that was
not sent. Its own delta + e is encoded. The encoded vector is kept as `JobResult.own`, from which
the next e follows.
"""

from __future__ import annotations

import numpy as np

from ngsgd.ops.compression import Codec, Encoded, decode, encode
from ngsgd.training.parameter_vector import FlatLayout, Vector

# (first element, values) of parts of a vector
Exact = tuple[tuple[int, Vector], ...]


def error_of(encoded: Vector, codec: Codec) -> Vector:
    """Return the part of a vector that its code does not contain."""
    return np.subtract(encoded, decode(encode(encoded, codec)))


def compress(move: Vector, before: Vector | None, codec: Codec, layout: FlatLayout, out: Vector) -> tuple[Encoded, Exact]:
    """Replace a delta by what its receiver decodes.

    Statistics of normalization layers are sent exactly: a variance with an error may be negative.

    Args:
        move: finite delta, which is overwritten.
        before: the vector that the previous job of the slot encoded, if any.
        codec: the codec.
        layout: of the vectors.
        out: receives the vector that is encoded: the delta and the error of `before`.

    Returns:
        The code, and the elements that are sent exactly.
    """
    np.copyto(out, move)
    if before is not None:
        np.add(out, error_of(before, codec), out=out)
    parts = [part for pair in layout.mean_and_variance() for part in pair]
    exact = tuple((part.start, move[part].copy()) for part in parts)
    for part in parts:
        out[part] = 0.0
    encoded = encode(out, codec)
    np.copyto(move, decompress(encoded, exact))
    return encoded, exact


def decompress(encoded: Encoded, exact: Exact) -> Vector:
    """Return a delta; ValueError if its code is damaged, as far as that can be seen."""
    move = decode(encoded)
    for first, values in exact:
        if not 0 <= first <= len(move) - len(values):
            raise ValueError(f"elements {first} to {first + len(values)} are outside of a delta of {len(move)}")
        move[first:first + len(values)] = values
    return move
