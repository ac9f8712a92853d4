"""Codecs for parameter deltas against slow ones, their error bounds, and their errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngsgd.ops.compression import GROUP_LENGTH, ROW_LENGTH, Codec, Encoded, decode, encode, num_bytes
from tests.reference import compression as reference

EVERY_CODEC = pytest.mark.parametrize("codec", ["int8", "sparse"])
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149
FLOATS = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-1.0, 1.0, width=32),
                   st.sampled_from([0.0, -0.0, SMALLEST, -SMALLEST, LARGEST, -LARGEST, 2.0**-126]))


def a_delta(size: int = 5000, seed: int = 0) -> Any:
    return (1e-3 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def rows_of(vector: Any) -> list[list[float]]:
    """The rows as float64; the last one is filled with zeros."""
    filled = np.zeros(-(-len(vector) // ROW_LENGTH) * ROW_LENGTH)
    filled[:len(vector)] = vector
    rows: list[list[float]] = filled.reshape(-1, ROW_LENGTH).tolist()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 17, 18, 19, 2160, 2161, 40_001])
@pytest.mark.parametrize("num_zeros", [0, 2000])
def test_sparse_is_the_slow_codec(size: int, num_zeros: int) -> None:
    vector = a_delta(size)
    vector[np.random.default_rng(1).permutation(size)[:num_zeros]] = 0.0
    expected = [x for row in rows_of(vector) for x in reference.sparse(row, GROUP_LENGTH)][:size]
    # means are rounded to float32
    np.testing.assert_allclose(decode(encode(vector, "sparse")), expected, rtol=2.0**-23)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_int8_comes_as_near_as_the_slow_codec(values: list[float]) -> None:
    vector = np.array(values, np.float32)
    peak = float(np.abs(vector.astype(np.float64)).max())
    found = decode(encode(vector, "int8")).astype(np.float64)
    for x, y, slow in zip(vector.astype(np.float64), found, reference.int8([float(x) for x in vector]), strict=True):
        # x / peak in float32 may cross the middle of two numbers by 2^-23; a subnormal is rounded
        # to its unit
        assert abs(y - x) <= abs(slow - x) + 1e-6 * peak + 2.0**-150


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(FLOATS, max_size=60))
def test_every_error_has_the_documented_bound(values: list[float]) -> None:
    vector = np.array(values, np.float32)
    exact = vector.astype(np.float64)
    size = np.abs(exact)
    error = np.abs(decode(encode(vector, "int8")).astype(np.float64) - exact)
    assert (error <= 0.5001 * size.max(initial=0.0) / 127 + 2.0**-150).all()
    found = decode(encode(vector, "sparse")).astype(np.float64)
    # the magnitude is rounded to float32
    assert (np.abs(found - exact) <= size * (1.0 + 2.0**-22)).all()
    assert np.isfinite(found).all()


@EVERY_CODEC
def test_zeros_stay_zeros_and_no_sign_is_turned(codec: Codec) -> None:
    vector = a_delta(20_000)
    # a layer that is not trained
    vector[3000:9000] = 0.0
    found = decode(encode(vector, codec))
    assert (found[vector == 0.0] == 0.0).all()
    assert (found * vector >= 0.0).all()
    assert not decode(encode(np.zeros(5000, np.float32), codec)).any()


def test_sparse_sends_at_most_one_element_of_a_group() -> None:
    found = decode(encode(a_delta(GROUP_LENGTH * 1000), "sparse")).reshape(-1, GROUP_LENGTH)
    assert set((found != 0.0).sum(axis=1)) == {0, 1}


@EVERY_CODEC
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 4711, 69_999])
def test_numbers_that_are_not_finite_are_refused_by_their_place(codec: Codec, bad: float, index: int) -> None:
    vector = a_delta(70_000)
    vector[index] = bad
    with pytest.raises(ValueError, match=rf"\b{index} of 70000 .*{bad}"):
        encode(vector, codec)


def test_only_flat_float32_vectors_and_known_codecs_are_accepted() -> None:
    for wrong in (np.zeros(3), np.zeros((2, 2), np.float32), np.zeros(3, np.float16)):
        with pytest.raises(ValueError, match="float32"):
            encode(wrong, "int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'int4'"):
        encode(a_delta(), "int4")  # type: ignore[arg-type]


@pytest.mark.parametrize(("codec", "bytes_of_a_row"), [("int8", 2164), ("sparse", 84)])
def test_bytes_of_a_row(codec: Codec, bytes_of_a_row: int) -> None:
    encoded = encode(a_delta(ROW_LENGTH * 48), codec)
    assert encoded.nbytes == bytes_of_a_row * 48 == sum(num_bytes(ROW_LENGTH * 48, codec))
    assert encoded.ratio == bytes_of_a_row / ROW_LENGTH / 4


@EVERY_CODEC
@pytest.mark.parametrize("size", [0, 1, 2, 2159, 2160, 2161, 40_001])
def test_any_size_has_equal_bytes_twice_and_is_not_changed(codec: Codec, size: int) -> None:
    vector = a_delta(size)
    first, second = encode(vector, codec), encode(vector.copy(), codec)
    assert first.codes.tobytes() + first.peaks.tobytes() == second.codes.tobytes() + second.peaks.tobytes()
    assert np.array_equal(vector, a_delta(size))
    found = decode(first)
    assert found.shape == vector.shape and found.dtype == np.float32


@EVERY_CODEC
def test_damaged_codes_are_refused(codec: Codec) -> None:
    whole = encode(a_delta(), codec)
    for codes, peaks in ((whole.codes[:-1], whole.peaks), (whole.codes, np.append(whole.peaks, np.float32(1.0)))):
        with pytest.raises(ValueError, match="not 5000"):
            decode(Encoded(codec, whole.size, codes, peaks))


@pytest.mark.parametrize("word", [255, 7])
def test_a_damaged_word_of_sparse_is_refused(word: int) -> None:
    """No code of twelve groups, and a place beyond the end."""
    encoded = encode(a_delta(), "sparse")
    codes = encoded.codes.copy()
    codes[-8:] = word
    with pytest.raises(ValueError, match="of 5000 elements"):
        decode(dataclasses.replace(encoded, codes=codes))


@pytest.mark.parametrize("kind", ["normal", "constant", "alternating", "sparse"])
@EVERY_CODEC
def test_the_error_stays_bounded_if_the_next_delta_includes_it(codec: Codec, kind: str) -> None:
    random = np.random.default_rng(0)
    direction = random.uniform(-1.0, 1.0, 3000)
    error, moved, sent = np.zeros(3000, np.float32), np.zeros(3000), np.zeros(3000)
    norms = []
    for t in range(300):
        move = {"normal": random.uniform(-1.0, 1.0, 3000), "constant": direction, "alternating": direction * (-1) ** t,
                "sparse": direction * (random.uniform(size=3000) < 0.05)}[kind].astype(np.float32)
        found = decode(encode(move + error, codec))
        error = move + error - found
        moved, sent = moved + move, sent + found
        norms.append(float(np.linalg.norm(error)))
    # float32: two roundings of numbers up to about 20 in each of 300 steps
    np.testing.assert_allclose(sent + error, moved, atol=300 * 2 * 20 * 2.0**-24)
    # of a size that does not grow any more
    assert max(norms[150:]) < 1.1 * max(norms[:150])
