"""Checksums of vectors: every change of the bits or of their order is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngsgd.training.parameter_vector import Vector
from ngsgd.training.validation.checksums import digest

PAGE = 4096  # elements: 16 KB
SIZE = 20 * PAGE + 7  # two chunks, the last of them odd


@pytest.fixture(scope="module")
def vector() -> Vector:
    return np.random.default_rng(0).normal(size=SIZE).astype(np.float32)


def is_found(vector: Vector, changed: Vector) -> bool:
    return digest(changed) != digest(vector)


def test_the_digest_depends_on_the_bits_alone(vector: Vector) -> None:
    spread = np.repeat(vector, 2)[::2]
    assert digest(spread) == digest(vector.copy()) == digest(vector)
    assert 0 <= digest(vector) < 1 << 61
    assert (
        digest(vector[:0]) != digest(vector[:1]) != digest(np.append(vector[:1], np.float32(0.0)))
    )


@given(st.integers(0, 18), st.integers(1, 18))
def test_two_swapped_pages_are_found(first: int, distance: int) -> None:
    vector = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    one, other = slice(first * PAGE, (first + 1) * PAGE), (first + distance) % 19 * PAGE
    changed = vector.copy()
    changed[one], changed[other : other + PAGE] = vector[other : other + PAGE], vector[one]
    assert is_found(vector, changed)


@given(st.integers(0, SIZE - 2), st.integers(2, SIZE), st.integers(1, 1 << 16))
def test_a_rotated_stretch_is_found(first: int, length: int, by: int) -> None:
    vector = np.random.default_rng(2).normal(size=SIZE).astype(np.float32)
    part = slice(first, min(first + length, SIZE))
    size = part.stop - part.start
    changed = vector.copy()
    changed[part] = np.roll(vector[part], by % size or 1)
    assert is_found(vector, changed)


@given(st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=8), st.integers(0, 31))
def test_the_same_bit_flipped_in_a_few_elements_is_found(places: set[int], bit: int) -> None:
    vector = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
    changed = vector.copy()
    changed.view(np.uint32)[sorted(places)] ^= np.uint32(1 << bit)
    assert is_found(vector, changed)


@given(st.integers(0, SIZE // 2 - 1), st.integers(0, SIZE // 2 - 1), st.integers(1, (1 << 64) - 1))
def test_an_addition_and_a_removal_in_two_places_are_found(
    one: int, other: int, amount: int
) -> None:
    vector = np.random.default_rng(4).normal(size=SIZE).astype(np.float32)
    changed = vector.copy()
    pairs = changed[: SIZE & ~1].view(np.uint64)
    pairs[one] += np.uint64(amount)
    pairs[other] -= np.uint64(amount)
    assert is_found(vector, changed) == (one != other)


def test_flipped_signs_do_not_cancel(vector: Vector) -> None:
    for part in (slice(0, None), slice(1, None, 2), slice(0, None, 2), slice(1, 4, 2)):
        changed = vector.copy()
        changed[part] *= -1.0
        assert is_found(vector, changed)


def test_a_rectangle_of_changes_does_not_cancel(vector: Vector) -> None:
    """Sums over rows and columns would miss it."""
    changed = vector.copy()
    changed.view(np.uint32)[[0, 256, 1024, 1280]] += np.array([1, -1, -1, 1]).astype(np.uint32)
    assert is_found(vector, changed)
