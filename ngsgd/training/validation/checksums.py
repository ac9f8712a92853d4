"""Checks that a received vector is the vector that was sent, and that it is finite."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from ngsgd.training.job import JobResult
from ngsgd.training.parameter_vector import FlatLayout, Pieces, Vector

# elements; together with the weights they fit into the cache of a core
_CHUNK = 1 << 16
_PRIME = (1 << 61) - 1
# base of the polynomial over the chunks
_BASE = 0x1B873593CC9E2D51 % _PRIME
_SEED = 1         # seed of the weights
_LOW_BITS = (1 << 33) - 1


def digest(vector: Vector) -> int:
    """Return a 61-bit checksum of the bits of a vector and of their order.

    Per chunk there are two sums modulo 2^64 over pairs of elements, each pair times the weight of
    its place: one sum of the pairs as 64-bit integers, one of only their upper halves. Swapped or
    rotated elements and changes that cancel in a plain sum change a weighted sum. The second sum
    preserves the top bits, most of which are lost in the first (two flipped signs would cancel).
    The sums of the chunks are combined as a polynomial.
    """
    words = np.ascontiguousarray(vector).view(np.uint32)
    weights, upper = _weights(), np.empty(_CHUNK // 2, np.uint64)
    value = len(words)
    for first in range(0, len(words), _CHUNK):
        chunk = words[first:first + _CHUNK]
        # pairs need no conversion, which would take six times as long as a sum
        pairs = chunk[:len(chunk) & ~1].view(np.uint64)
        halves = np.right_shift(pairs, np.uint64(32), out=upper[:len(pairs)])
        weight = weights[:len(pairs)]
        last = int(chunk[-1]) if len(chunk) & 1 else 0
        for total in (int(np.dot(pairs, weight)), int(np.dot(halves, weight)), last):
            value = (value * _BASE + total) % _PRIME
    return value


@cache
def _weights() -> npt.NDArray[np.uint64]:
    """Random odd weights, one for each pair of a chunk: a change of a single pair is never lost.

    The lower 33 bits of no two weights are equal or negatives of each other, so two flipped signs
    in a chunk never cancel.
    """
    # a few random weights coincide in these bits and are dropped, so twice as many are generated
    random = np.random.Generator(np.random.PCG64(_SEED))
    drawn = random.integers(0, 1 << 64, _CHUNK, dtype=np.uint64) | np.uint64(1)
    low = drawn & np.uint64(_LOW_BITS)
    _, kept = np.unique(np.minimum(low, np.uint64(_LOW_BITS + 1) - low), return_index=True)
    return drawn[np.sort(kept)[:_CHUNK // 2]]


def is_finite(vector: Vector) -> bool:
    """Whether all elements are finite."""
    # a sum of squares is NaN or Inf if any element is, at the speed of memory; it may overflow
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.dot(vector, vector)) or np.isfinite(vector).all())


def is_damaged(result: JobResult, layout: FlatLayout) -> str:
    """Return how the vector of a result differs from the one sent; empty if it does not."""
    # the vector has not been transferred yet, so it cannot be damaged
    if not result.sent.is_here:
        return ""
    vector = result.sent.read()
    size = sum(source.stop - source.start for _, source in layout.fragment(*result.job.send))
    if vector.dtype != np.float32 or vector.shape != (size,):
        return (f"its parameters are {vector.dtype} of shape {vector.shape}, not float32 of ({size},)")
    return "" if digest(vector) == result.digest else "its parameters do not match their checksum"


def not_finite(vector: Vector, layout: FlatLayout, pieces: Pieces) -> str:
    """Return which parameters of a fragment with `pieces` are not finite; empty if all are."""
    if all(is_finite(part) for part in np.array_split(vector, max(1, len(vector) // _CHUNK))):
        return ""
    bad = np.flatnonzero(~np.isfinite(vector))
    element = int(bad[0])
    (target,) = [target.start + element - source.start for target, source in pieces if source.start <= element < source.stop]
    return f"{len(bad)} of its parameters are not finite, the first in {layout.name_at(target)}"
