"""Random permutations that need no memory: any entry is computed from its position.

A Feistel network of hash functions permutes the next larger power of four. Values out of range are
permuted again until they are in range (cycle walking). The time for an entry does not depend on the
size of the range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_NUM_ROUNDS = 6


class Permutation:
    """A permutation of 0 to `size` - 1, determined by `seed`.

    Args:
        size: number of entries, at least 1.
        seed: non-negative integers; every different sequence gives another permutation.

    Example:
        >>> permutation = Permutation(5, seed=(1, 2))
        >>> sorted(permutation.at(0, 5).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: Sequence[int]) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one entry, not {size}")
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        # the length, because a SeedSequence ignores trailing zeros
        self._keys = np.random.SeedSequence([len(seed), *seed]).generate_state(_NUM_ROUNDS, np.uint64)

    def at(self, first: int, stop: int) -> Indices:
        """Return the entries at positions `first` to `stop` - 1."""
        if not 0 <= first <= stop <= self.size:
            raise IndexError(f"positions {first} to {stop} of a permutation of {self.size} entries")
        return self.of(np.arange(first, stop))

    def of(self, positions: Indices) -> Indices:
        """Return the entries at these positions."""
        values = self._rounds(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._rounds(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _rounds(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._shift, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_hash(right ^ key) & self._mask)
        return (left << self._shift) | right


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix all bits (splitmix64: Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
