"""A stream is cut at pauses, in constant memory, whatever the size of its chunks."""

from __future__ import annotations

import numpy as np
import pytest

from ngsgd.asr.segmentation import Segmenter, Stretch
from tests.asr import tiny_recognizer


def noise(seconds: float, rate_hz: int, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * rate_hz))
    return np.asarray(20 * samples, dtype=np.float32)


def speech(seconds: float, rate_hz: int, seed: int = 0) -> np.ndarray:
    """Chords without a long pause."""
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < seconds * rate_hz:
        samples = tiny_recognizer.say(["NO", "YES"], seed=seed + len(pieces), rate_hz=rate_hz)
        pieces.append(samples[int(0.35 * rate_hz) : -int(0.35 * rate_hz)].astype(np.float32))
    return np.concatenate(pieces)[: int(seconds * rate_hz)]


def cut(samples: np.ndarray, rate_hz: int, chunk: int = 10_000) -> list[Stretch]:
    segmenter = Segmenter(rate_hz)
    found: list[Stretch] = []
    for first in range(0, len(samples), chunk):
        found += segmenter.accept(samples[first : first + chunk])
    last = segmenter.finish()
    return found + ([last] if last else [])


def same(one: list[Stretch], other: list[Stretch]) -> bool:
    return len(one) == len(other) and all(
        a.first == b.first and np.array_equal(a.samples, b.samples)
        for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rate_hz", [8000, 16000, 11025, 22050])
def test_a_short_recording_stays_as_it_is(rate_hz: int) -> None:
    samples = speech(4.0, rate_hz)
    [stretch] = cut(samples, rate_hz)
    assert stretch.first == 0 and np.array_equal(stretch.samples, samples)


@pytest.mark.parametrize("chunk", [1, 77, 240, 50_000])
def test_the_size_of_chunks_changes_nothing(chunk: int) -> None:
    samples = np.concatenate([noise(3.0, 8000), speech(5.0, 8000), noise(4.0, 8000),
                              speech(3.0, 8000)])
    assert same(cut(samples, 8000, chunk), cut(samples, 8000, 3001))


def test_long_silence_is_skipped_and_half_a_second_stays() -> None:
    samples = np.concatenate([noise(20.0, 8000), speech(5.0, 8000), noise(30.0, 8000),
                              speech(5.0, 8000), noise(9.0, 8000)])
    stretches = cut(samples, 8000)
    assert len(stretches) == 2
    for stretch, start_s in zip(stretches, (20.0, 55.0), strict=True):
        end = stretch.first + len(stretch.samples)
        assert start_s - 3.0 < stretch.first / 8000 < start_s - 0.2
        assert start_s + 5.0 < end / 8000 < start_s + 6.5
        assert np.array_equal(stretch.samples, samples[stretch.first:end])


def test_speech_without_pauses_is_cut_into_limited_stretches_that_lose_nothing() -> None:
    samples = speech(100.0, 8000)
    stretches = cut(samples, 8000)
    assert np.array_equal(np.concatenate([one.samples for one in stretches]), samples)
    assert len(stretches) >= 3 and max(len(one.samples) for one in stretches) <= 30.1 * 8000


def test_silence_is_no_stretch() -> None:
    assert cut(np.zeros(80_000, np.float32), 8000) == []
    assert cut(noise(60.0, 8000), 8000) == []


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.3])
def test_a_recording_of_one_short_word_is_speech(seconds: float) -> None:
    samples = speech(2.0, 8000)[: int(seconds * 8000)]
    [stretch] = cut(samples, 8000)
    assert np.array_equal(stretch.samples, samples)
