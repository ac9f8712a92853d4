"""Is a vector that arrived the one that was sent, and is it made of numbers?"""

from __future__ import annotations

import numpy as np

from ngsgd.training.flat import Layout, Pieces, Vector
from ngsgd.training.job import JobResult

_CHUNK = 1 << 17  # elements
_PRIME = (1 << 61) - 1


def digest(vector: Vector) -> int:
    """A 61-bit checksum of the bits of a vector, made at the speed of memory; any single wrong word changes it.

    Per chunk the sum, modulo 2^64, of its words taken in pairs; the sums are joined as a polynomial, so that exchanged chunks
    show too.
    """
    words = np.ascontiguousarray(vector).view(np.uint32)
    value = len(words)
    for first in range(0, len(words), _CHUNK):
        chunk = words[first:first + _CHUNK]
        even = len(chunk) & ~1
        # pairs need no conversion, which would take six times as long as the sum
        total = int(chunk[:even].view(np.uint64).sum(dtype=np.uint64)) + int(chunk[even:].sum(dtype=np.uint64))
        value = (value * 31 + total) % _PRIME
    return value


def is_finite(vector: Vector) -> bool:
    """Whether all elements are numbers."""
    # a sum of squares is NaN or Inf if any element is, and BLAS makes it at the speed of memory; it may also overflow
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.dot(vector, vector)) or np.isfinite(vector).all())


def is_damaged(result: JobResult, size: int) -> str:
    """Why the vector of a result, of which `size` elements are expected, is not what its worker sent; empty if it is."""
    if not result.sent.is_here:  # nothing was moved yet that could have been damaged
        return ""
    vector = result.sent.read()
    if vector.dtype != np.float32 or vector.shape != (size,):
        return f"its parameters are {vector.dtype} of shape {vector.shape}, not float32 of ({size},)"
    return "" if digest(vector) == result.digest else "its parameters do not match their checksum"


def not_finite(vector: Vector, layout: Layout, pieces: Pieces) -> str:
    """Which parameters of a fragment that holds `pieces` of the model are not numbers; empty if all are."""
    if all(is_finite(part) for part in np.array_split(vector, max(1, len(vector) // _CHUNK))):
        return ""
    bad = np.flatnonzero(~np.isfinite(vector))
    element = int(bad[0])
    (target,) = [target.start + element - source.start for target, source in pieces if source.start <= element < source.stop]
    return f"{len(bad)} of its parameters are not finite, the first in {layout.name_at(target)}"
