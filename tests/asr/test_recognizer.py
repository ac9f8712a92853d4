"""A recognizer finds the words of recordings, arrays and streams, and the same ones in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import ngsgd
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.recognizer import Recognizer
from ngsgd.asr.transcript import Partial, Segment
from ngsgd.errors import DataError
from tests.asr import tiny_recognizer

WORDS = ["NO", "YES", "YES", "NO", "YES"]
RATE_HZ = tiny_recognizer.RATE_HZ


@pytest.fixture(scope="module", params=["utterance", "speaker", "online"])
def recognizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recognizer:
    features = replace(tiny_recognizer.FEATURES, cmvn=request.param)
    path = tmp_path_factory.mktemp("bundle") / "model.ngsgd"
    return ngsgd.asr.Recognizer.load(tiny_recognizer.write(path, features))


def long_recording(num_parts: int = 6) -> tuple[np.ndarray, list[str]]:
    """Speech with pauses of three seconds between its parts."""
    rng = np.random.default_rng(0)
    pieces = []
    for number in range(num_parts):
        pause = np.round(60 * rng.standard_normal(3 * RATE_HZ)).astype(np.int16)
        pieces += [tiny_recognizer.say(WORDS, seed=number), pause]
    return np.concatenate(pieces), num_parts * WORDS


def words_of(found: object) -> list[str]:
    return [word.word for word in found.words]  # type: ignore[attr-defined]


def test_words_have_times_in_order_and_confidences(recognizer: Recognizer) -> None:
    samples = tiny_recognizer.say(WORDS)
    transcript = recognizer.transcribe(samples)
    assert transcript.text == " ".join(WORDS)
    assert transcript.duration_s == pytest.approx(len(samples) / RATE_HZ)
    times = [time for word in transcript.words for time in (word.start_s, word.end_s)]
    assert times == sorted(times) and times[0] > 0.3 and times[-1] < transcript.duration_s
    assert all(0.5 < word.confidence <= 1.0 for word in transcript.words)


def test_arrays_tensors_and_files_give_the_same(recognizer: Recognizer, tmp_path: Path) -> None:
    samples = tiny_recognizer.say(WORDS)
    soundfile.write(tmp_path / "a.flac", samples, RATE_HZ)
    expected = recognizer.transcribe(samples)
    path, of_32_bits = tmp_path / "a.flac", samples.astype(np.int32) << 16
    for audio in (path, str(path), samples / 32768.0, torch.from_numpy(samples), of_32_bits):
        assert recognizer.transcribe(audio) == expected


def test_a_stream_has_the_same_segments_for_any_chunks(recognizer: Recognizer) -> None:
    samples, words = long_recording()
    whole = recognizer.transcribe(samples, num_best=2)
    assert words_of(whole) == words and len(whole.segments) > 3
    cuts = np.cumsum(np.random.default_rng(1).integers(1, 9000, size=len(samples) // 4000))
    found = list(recognizer.stream(np.split(samples, cuts[cuts < len(samples)]), num_best=2))
    assert tuple(one for one in found if isinstance(one, Segment)) == whole.segments


def test_partial_words_come_before_the_end_and_grow(recognizer: Recognizer) -> None:
    samples = tiny_recognizer.say(WORDS)
    found = list(recognizer.stream(np.split(samples, range(800, len(samples), 800))))
    partial = [one for one in found if isinstance(one, Partial)]
    assert isinstance(found[-1], Segment) and not any(one.is_final for one in partial)
    # the mean so far is not that of the utterance: the draft may differ by a word
    assert len(WORDS) - 1 <= len(partial[-1].words) <= len(WORDS) + 1
    assert partial[0].end_s < partial[-1].end_s and len(partial[0].words) < len(partial[-1].words)


def test_another_rate_is_resampled_and_times_stay(recognizer: Recognizer) -> None:
    narrow = recognizer.transcribe(tiny_recognizer.say(WORDS))
    wide_rate = 4 * RATE_HZ
    found = recognizer.transcribe(np.repeat(tiny_recognizer.say(WORDS), 4), wide_rate)
    assert words_of(found) == WORDS and found.sample_rate_hz == wide_rate
    for one, other in zip(found.words, narrow.words, strict=True):
        assert one.start_s == pytest.approx(other.start_s, abs=0.05)


def test_channels_are_recognized_one_by_one(recognizer: Recognizer) -> None:
    left, right = tiny_recognizer.say(WORDS), tiny_recognizer.say(WORDS[::-1])
    length = min(len(left), len(right))
    both = np.stack([left[:length], right[:length]], axis=1)
    for audio in (both, both.T):
        found = recognizer.transcribe(audio)
        assert found.num_channels == 2
        assert words_of(found.channel(1)) == WORDS and words_of(found.channel(2)) == WORDS[::-1]


def test_several_hypotheses_differ_and_the_first_is_the_best(recognizer: Recognizer) -> None:
    [segment] = recognizer.transcribe(tiny_recognizer.say(WORDS), num_best=3).segments
    texts = [tuple(word.word for word in one.words) for one in segment.hypotheses]
    assert 1 <= len(texts) <= 3 and len(set(texts)) == len(texts)
    costs = [one.cost for one in segment.hypotheses]
    assert costs == sorted(costs)


@pytest.mark.parametrize("num_samples", [0, 1, 3 * RATE_HZ])
def test_silence_gives_no_word(recognizer: Recognizer, num_samples: int) -> None:
    samples = np.zeros(num_samples, np.int16)
    assert recognizer.transcribe(samples).words == ()
    assert list(recognizer.stream([samples])) == []


@pytest.mark.parametrize("rate_hz", [0, -8000, 100, 10**9])
def test_an_impossible_rate_is_refused(recognizer: Recognizer, rate_hz: int) -> None:
    samples = np.zeros(100, np.int16)
    for call in (lambda: recognizer.transcribe(samples, rate_hz),
                 lambda: list(recognizer.stream([samples], rate_hz))):
        with pytest.raises(DataError, match="Hz"):
            call()


def test_a_file_has_its_own_rate(recognizer: Recognizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sample_rate_hz"):
        recognizer.transcribe(tmp_path / "a.wav", 8000)


def test_a_live_stream_is_recognized_while_it_comes(recognizer: Recognizer) -> None:
    samples, _ = long_recording(3)
    sent = 0

    def chunks() -> Iterator[np.ndarray]:
        nonlocal sent
        for chunk in np.split(samples, range(1600, len(samples), 1600)):
            sent += len(chunk)
            yield chunk
    first = next(iter(one for one in recognizer.stream(chunks()) if isinstance(one, Segment)))
    assert sent < len(samples) / 2
    # two seconds of silence end a segment
    assert sent / RATE_HZ < first.words[-1].end_s + 3.0


def test_a_model_on_given_features_takes_no_audio(tmp_path: Path) -> None:
    loaded = Bundle.load(tiny_recognizer.write(tmp_path / "model.ngsgd"))
    given = replace(loaded, features=replace(loaded.features, kind="given"))
    with pytest.raises(DataError, match=r"features\.kind"):
        Recognizer(given)
