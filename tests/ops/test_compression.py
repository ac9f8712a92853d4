"""Codecs for moves against slow ones, their error bounds, and error feedback."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ngsgd.ops.compression import BLOCK_LENGTH, DECAY, NUM_SENT, Codec, Encoded, ErrorFeedback, decode, encode
from tests.reference import compression as reference

CODECS: tuple[Codec, ...] = ("bf16", "int8", "e3m0")
# those that send every element
EVERY_CODEC = pytest.mark.parametrize("codec", CODECS)
WITH_TOPK = pytest.mark.parametrize("codec", [*CODECS, "topk"])
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149
# any finite float32, and rows whose elements are of similar size
FLOATS = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-1.0, 1.0, width=32),
                   st.sampled_from([0.0, -0.0, SMALLEST, -SMALLEST, LARGEST, -LARGEST, 2.0**-126]))


@st.composite
def rows_of_floats(draw: st.DrawFn) -> tuple[Any, list[int]]:
    """(vector, lengths of its rows), some of them empty."""
    rows = draw(st.lists(st.lists(FLOATS, max_size=9), max_size=6))
    return np.array([x for row in rows for x in row], np.float32), [len(row) for row in rows]


def per_element(vector: Any, lengths: list[int]) -> list[float]:
    return reference.row_peaks([float(x) for x in vector], lengths)


def a_move(size: int = 5000, seed: int = 0) -> Any:
    return (1e-3 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


# ---------------------------------------------------------------------------------- the slow codecs
@pytest.mark.slow
@given(st.lists(FLOATS))
# about the largest number; two ties
@example([3.3961775e38, -3.3961775e38, 3.3895314e38, 1.00390625, 1.01171875])
def test_bf16_is_the_nearest_number_of_8_bits(values: list[float]) -> None:
    vector = np.array(values, np.float32)
    expected = np.array([reference.bf16(float(x)) for x in vector], np.float32)
    assert decode(encode(vector, "bf16")).view(np.uint32).tolist() == expected.view(np.uint32).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "e3m0"])
@settings(max_examples=300)
@given(rows_of_floats())
def test_int8_and_e3m0_come_as_near_as_the_slow_ones(codec: Codec, vector_and_rows: tuple[Any, list[int]]) -> None:
    vector, lengths = vector_and_rows
    slow = reference.int8 if codec == "int8" else reference.e3m0
    found = decode(encode(vector, codec, rows=lengths)).astype(np.float64)
    for x, y, peak in zip(vector.astype(np.float64), found, per_element(vector, lengths), strict=True):
        # x / peak in float32 may cross the middle of two numbers by 2^-23; a subnormal is rounded
        # to its unit
        assert abs(y - x) <= abs(slow(x, peak) - x) + 1e-6 * peak + 2.0**-150


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 63, 64, 100, 4096, 4097, 9000, 40_001])
@pytest.mark.parametrize("num_zeros", [0, 4000])
def test_topk_is_the_slow_one_per_block(size: int, num_zeros: int) -> None:
    vector = a_move(size)
    vector[np.random.default_rng(1).permutation(size)[:num_zeros]] = 0.0
    expected = []
    for first in range(0, size, BLOCK_LENGTH):
        block = [float(x) for x in vector[first:first + BLOCK_LENGTH]]
        expected += reference.topk(block + [0.0] * (BLOCK_LENGTH - len(block)), NUM_SENT)[:len(block)]
    # float64 sums in another order, rounded to float32
    np.testing.assert_allclose(decode(encode(vector, "topk")), expected, rtol=2.0**-23)


def test_the_error_of_a_block_of_topk_is_not_longer_than_the_block() -> None:
    for seed in range(20):
        block = a_move(BLOCK_LENGTH, seed) ** (1 + seed % 3)
        error = block - decode(encode(block, "topk"))
        assert np.linalg.norm(error) < np.linalg.norm(block)


def test_a_damaged_place_of_topk_is_refused() -> None:
    encoded = encode(a_move(5000), "topk")
    codes = encoded.codes.copy()
    # a place in the last block, which has 904 elements
    codes[-112:-109] = 255
    with pytest.raises(ValueError, match="outside of 5000 elements"):
        decode(dataclasses.replace(encoded, codes=codes))


def test_the_error_of_topk_decays() -> None:
    sender = ErrorFeedback("topk")
    move = a_move(5000)
    first = decode(sender.encode(move))
    assert sender.error is not None and np.array_equal(sender.error, move - first)
    error = sender.error.copy()
    second = decode(sender.encode(np.zeros_like(move)))
    np.testing.assert_array_equal(second, decode(encode(error * np.float32(DECAY), "topk")))


# ------------------------------------------------------------------------------------------- bounds
@pytest.mark.slow
@settings(max_examples=300)
@given(rows_of_floats())
def test_every_error_keeps_the_documented_bound(vector_and_rows: tuple[Any, list[int]]) -> None:
    vector, lengths = vector_and_rows
    peaks = np.array(per_element(vector, lengths))
    size = np.abs(vector.astype(np.float64))
    bounds = {"bf16": size / 2**8 + 2.0**-134, "int8": 0.5001 * peaks / 127 + 2.0**-150,
              "e3m0": np.maximum(0.3334 * size, peaks / 128) + 2.0**-150}
    for codec in CODECS:
        found = decode(encode(vector, codec, rows=lengths)).astype(np.float64)
        assert (np.abs(found - vector.astype(np.float64)) <= bounds[codec]).all(), codec
        assert (found[vector == 0.0] == 0.0).all()
        assert (found * vector.astype(np.float64) >= 0.0).all()  # no sign is turned
        if codec != "bf16":
            peak = size == peaks
            assert (found[peak] == vector[peak]).all()


@EVERY_CODEC
@pytest.mark.parametrize("value", [LARGEST, -LARGEST, SMALLEST, 3 * SMALLEST, 2.0**-126])
def test_huge_and_subnormal_numbers_stay_finite_and_near(codec: Codec, value: float) -> None:
    vector = np.array([value, 0.0, value / 2.0, value], np.float32)
    found = decode(encode(vector, codec))
    assert np.isfinite(found).all()
    if codec != "bf16":
        assert found[[0, 1, 3]].tolist() == vector[[0, 1, 3]].tolist()


@WITH_TOPK
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 4711, 69_999])
def test_numbers_that_are_not_finite_are_refused_by_their_place(codec: Codec, bad: float, index: int) -> None:
    vector = a_move(70_000)
    vector[index] = bad
    with pytest.raises(ValueError, match=rf"\b{index} of 70000 .*{bad}"):
        encode(vector, codec)


def test_only_flat_float32_vectors_are_accepted() -> None:
    for wrong in (np.zeros(3), np.zeros((2, 2), np.float32), np.zeros(3, np.float16)):
        with pytest.raises(ValueError, match="float32"):
            encode(wrong, "int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'int4'"):
        encode(a_move(), "int4")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------- rows and bytes
@pytest.mark.parametrize(("codec", "bytes_per_element"), [("bf16", 2.0), ("int8", 1.0 + 4 / 1024), ("e3m0", 0.5 + 4 / 1024),
                                                           ("topk", 120 / 4096)])
def test_bytes_per_element(codec: Codec, bytes_per_element: float) -> None:
    encoded = encode(a_move(1024 * 48), codec)
    assert encoded.nbytes == bytes_per_element * 1024 * 48
    assert encoded.ratio == bytes_per_element / 4


@EVERY_CODEC
@pytest.mark.parametrize("size", [0, 1, 2, 1023, 1024, 1025, 40_001])
def test_any_size_survives_a_round_trip(codec: Codec, size: int) -> None:
    vector = a_move(size)
    found = decode(encode(vector, codec))
    assert found.shape == vector.shape
    assert found.dtype == np.float32
    # the bound of the coarsest codec; a third of each element or 1/128 of the peak
    np.testing.assert_allclose(found, vector, rtol=0.3334, atol=np.abs(vector).max(initial=0.0) / 128)


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
@given(lengths=st.lists(st.integers(0, 40), max_size=8), scale=st.integers(-30, 30))
def test_a_row_does_not_see_the_others(codec: Codec, lengths: list[int], scale: int) -> None:
    vector = a_move(sum(lengths))
    whole = decode(encode(vector, codec, rows=lengths))
    first = 0
    for length in lengths:
        row = vector[first:first + length] * np.float32(2.0**scale)  # a power of two: exact
        alone = decode(encode(row, codec, rows=[length]))
        assert np.array_equal(alone, whole[first:first + length] * np.float32(2.0**scale))
        first += length


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
def test_a_fixed_length_is_rows_of_that_length_and_a_shorter_last_one(codec: Codec) -> None:
    vector = a_move(100_001)
    fixed, given_lengths = encode(vector, codec, rows=700), encode(vector, codec, rows=[700] * 142 + [601])
    assert np.array_equal(fixed.codes, given_lengths.codes)
    assert np.array_equal(fixed.peaks, given_lengths.peaks)
    assert np.array_equal(decode(fixed), decode(given_lengths))


@pytest.mark.parametrize("rows", [[3, 3], [3, 5], [9, -2], 0, -1])
def test_rows_that_do_not_make_the_vector_are_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="rows"):
        encode(a_move(7), "int8", rows=rows)


@WITH_TOPK
def test_equal_vectors_have_equal_bytes(codec: Codec) -> None:
    vector = a_move(70_000)
    first, second = encode(vector, codec), encode(vector.copy(), codec)
    assert first.codes.tobytes() + first.peaks.tobytes() == second.codes.tobytes() + second.peaks.tobytes()
    assert np.array_equal(vector, a_move(70_000))  # and the vector is left as it was


@WITH_TOPK
@pytest.mark.parametrize("rows", [1024, (3000, 0, 2000)])
def test_encoded_vectors_travel_as_json_and_raw_bytes(codec: Codec, rows: Any) -> None:
    encoded = encode(a_move(), codec, rows=rows)
    words = json.loads(json.dumps({"codec": encoded.codec, "size": encoded.size, "rows": encoded.rows}))
    codes, peaks = encoded.codes.tobytes(), encoded.peaks.tobytes()
    again = Encoded(**words, codes=np.frombuffer(codes, np.uint8), peaks=np.frombuffer(peaks, np.float32))
    assert np.array_equal(decode(again), decode(encoded))


@WITH_TOPK
def test_truncated_bytes_are_refused(codec: Codec) -> None:
    whole = encode(a_move(), codec)
    for codes, peaks in ((whole.codes[:-1], whole.peaks), (whole.codes, np.append(whole.peaks, np.float32(1.0)))):
        with pytest.raises(ValueError, match="not 5000"):
            decode(Encoded(codec, whole.size, whole.rows, codes, peaks))


# ----------------------------------------------------------------------------------- error feedback
@EVERY_CODEC
def test_sent_deltas_and_residuals_sum_to_all_deltas(codec: Codec) -> None:
    feedback, num_moves = ErrorFeedback(codec), 200
    sent = moved = np.zeros(5000)
    for t in range(num_moves):
        move = a_move(seed=t)
        moved = moved + move
        sent = sent + decode(feedback.encode(move))
    assert feedback.error is not None
    # exact, but for two roundings to float32 of numbers up to 0.01 in each step
    np.testing.assert_allclose(sent + feedback.error, moved, rtol=0.0, atol=num_moves * 2 * 0.01 * 2.0**-24)


@EVERY_CODEC
def test_moves_of_few_digits_telescope_to_the_last_bit(codec: Codec) -> None:
    feedback = ErrorFeedback(codec, rows=16)
    random, sent, moved = np.random.default_rng(0), np.zeros(64), np.zeros(64)
    for _ in range(100):
        # multiples of 1/64 with peaks of 127/64: what the codecs have is then a multiple of 2^-12,
        # exact in float32
        move = (random.integers(-20, 21, 64) / 64).astype(np.float32)
        move[::16] = 127 / 64 - (feedback.error[::16] if feedback.error is not None else 0.0)
        moved += move
        sent += decode(feedback.encode(move))
        assert feedback.error is not None
        np.testing.assert_array_equal(sent + feedback.error, moved)


@EVERY_CODEC
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["normal", "constant", "alternating", "sparse"]))
def test_the_compression_error_stays_bounded(codec: Codec, seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    direction = random.uniform(-1.0, 1.0, 300)
    feedback = ErrorFeedback(codec, rows=50)
    c = {"bf16": 0.004, "int8": 0.004, "e3m0": 0.2501}[codec]
    for t in range(60):
        move = {"normal": random.uniform(-1.0, 1.0, 300), "constant": direction, "alternating": direction * (-1) ** t,
                "sparse": direction * (random.uniform(size=300) < 0.05)}[kind].astype(np.float32)
        feedback.encode(move)
        assert feedback.error is not None
        # moves of at most 1; the sum of move and error rounds once to float32
        assert np.abs(feedback.error).max() <= c / (1.0 - c) * (1.0 + 1e-6)


def test_a_move_too_small_for_the_codec_gets_through_in_the_end() -> None:
    # a peak of 1 and less than 1/128 of it
    feedback, move = ErrorFeedback("e3m0"), np.array([1.0, 0.001], np.float32)
    assert decode(encode(move, "e3m0"))[1] == 0.0
    sent = sum(decode(feedback.encode(move)).astype(np.float64) for _ in range(1000))
    # the residual is at most the step about 1/64 of the peak
    np.testing.assert_allclose(sent, [1000.0, 1.0], atol=1.0 / 64)


@WITH_TOPK
def test_a_reset_clears_the_residual(codec: Codec) -> None:
    feedback = ErrorFeedback(codec)
    first = feedback.encode(a_move()).codes
    assert not np.array_equal(feedback.encode(a_move()).codes, first)
    feedback.reset()
    assert feedback.error is None
    assert np.array_equal(feedback.encode(a_move()).codes, first)


def test_a_refused_move_changes_nothing() -> None:
    feedback = ErrorFeedback("int8")
    feedback.encode(a_move())
    assert feedback.error is not None
    owed = feedback.error.copy()
    with pytest.raises(ValueError, match="element 0"):
        feedback.encode(np.full(5000, np.nan, np.float32))
    with pytest.raises(ValueError, match=r"10 elements.*5000"):
        feedback.encode(a_move(10))
    assert np.array_equal(feedback.error, owed)
