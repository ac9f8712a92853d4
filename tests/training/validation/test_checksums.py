"""Checksums of vectors: every change of the bits or of their order is found."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ngsgd.training.parameter_vector import Vector
from ngsgd.training.validation.checksums import digest

PAGE = 4096  # elements: 16 KB
SIZE = 20 * PAGE + 7  # two chunks, the last of them odd


VECTOR = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)


def is_found(changed: Vector) -> bool:
    return digest(changed) != digest(VECTOR)


def test_the_digest_depends_on_the_bits_alone() -> None:
    spread = np.repeat(VECTOR, 2)[::2]
    assert digest(spread) == digest(VECTOR.copy()) == digest(VECTOR)
    assert 0 <= digest(VECTOR) < 1 << 61
    one = VECTOR[:1]
    assert digest(VECTOR[:0]) != digest(one) != digest(np.append(one, np.float32(0.0)))


@given(st.integers(0, 18), st.integers(1, 18))
def test_two_swapped_pages_are_found(first: int, distance: int) -> None:
    pages = VECTOR[:19 * PAGE].reshape(19, PAGE).copy()
    other = (first + distance) % 19
    pages[[first, other]] = pages[[other, first]]
    assert is_found(np.append(pages, VECTOR[19 * PAGE:]))


@given(st.integers(0, SIZE - 2), st.integers(2, SIZE), st.integers(1, 1 << 16))
def test_a_rotated_stretch_is_found(first: int, length: int, by: int) -> None:
    part = slice(first, min(first + length, SIZE))
    changed = VECTOR.copy()
    changed[part] = np.roll(VECTOR[part], by % (part.stop - part.start) or 1)
    assert is_found(changed)


@given(st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=8), st.integers(0, 31))
def test_the_same_bit_flipped_in_a_few_elements_is_found(places: set[int], bit: int) -> None:
    changed = VECTOR.copy()
    changed.view(np.uint32)[sorted(places)] ^= np.uint32(1 << bit)
    assert is_found(changed)


@given(st.integers(0, SIZE // 2 - 1), st.integers(0, SIZE // 2 - 1), st.integers(1, (1 << 64) - 1))
def test_an_addition_and_a_removal_in_two_places_are_found(
        one: int, other: int, amount: int) -> None:
    changed = VECTOR.copy()
    pairs = changed[: SIZE & ~1].view(np.uint64)
    pairs[one] += np.uint64(amount)
    pairs[other] -= np.uint64(amount)
    assert is_found(changed) == (one != other)


def test_flipped_signs_do_not_cancel() -> None:
    for part in (slice(0, None), slice(1, None, 2), slice(0, None, 2), slice(1, 4, 2)):
        changed = VECTOR.copy()
        changed[part] *= -1.0
        assert is_found(changed)


def test_a_rectangle_of_changes_does_not_cancel() -> None:
    """Sums over rows and columns would miss it."""
    changed = VECTOR.copy()
    changed.view(np.uint32)[[0, 256, 1024, 1280]] += np.array([1, -1, -1, 1]).astype(np.uint32)
    assert is_found(changed)
