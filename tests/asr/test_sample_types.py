"""Samples of every type are scaled by their type, or refused."""

from __future__ import annotations

import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.asr.recognizer import Recognizer
from ngsgd.asr.transcript import Segment
from ngsgd.errors import ArgumentError, DataError
from tests.asr import tiny_recognizer

WORDS = ["NO", "YES", "YES", "NO", "YES"]
SAMPLES = tiny_recognizer.say(WORDS)


@pytest.fixture(scope="module")
def recognizer(tmp_path_factory: pytest.TempPathFactory) -> Recognizer:
    return Recognizer.load(tiny_recognizer.write(tmp_path_factory.mktemp("bundle") / "model.ngsgd"))


def whole(recognizer: Recognizer, audio: Any) -> str:
    return recognizer.transcribe(audio).text


def in_chunks(recognizer: Recognizer, audio: Any) -> str:
    chunks = [audio[at:at + 800] for at in range(0, len(audio), 800)]
    return " ".join(found.text for found in recognizer.stream(chunks, partial=False) if isinstance(found, Segment))


CALLS = pytest.mark.parametrize("call", [whole, in_chunks])

SCALED: dict[str, Callable[[], Any]] = {
    "int16": lambda: SAMPLES, "int32": lambda: SAMPLES.astype(np.int32) << 16,
    "big endian": lambda: SAMPLES.astype(">i2"), "float list": (SAMPLES / 32768).tolist,
    "float16": lambda: (SAMPLES / 32768).astype(np.float16), "float64": lambda: SAMPLES / 32768,
    "uint8": lambda: ((SAMPLES.astype(np.int32) >> 8) + 128).astype(np.uint8),
    "int8": lambda: (SAMPLES.astype(np.int32) >> 8).astype(np.int8),
    "tensor": lambda: torch.from_numpy(SAMPLES),
    "bfloat16": lambda: torch.from_numpy(SAMPLES / 32768).to(torch.bfloat16),
    "gradient": lambda: torch.from_numpy(SAMPLES / 32768).requires_grad_(),
    "array": lambda: array.array("h", SAMPLES.tolist()),
    "memoryview": lambda: memoryview(array.array("h", SAMPLES.tolist()))}
REFUSED: dict[str, Callable[[], Any]] = {
    "list of integers": SAMPLES.tolist, "int64": lambda: SAMPLES.astype(np.int64),
    "uint16": lambda: SAMPLES.astype(np.uint16), "uint64": lambda: SAMPLES.astype(np.uint64),
    "int32 with 16 bits": lambda: SAMPLES.astype(np.int32),
    "int32 tensor with 16 bits": lambda: torch.from_numpy(SAMPLES).int(),
    "float with 16 bits": lambda: SAMPLES.astype(np.float32),
    "complex": lambda: SAMPLES.astype(np.complex64), "bytes": SAMPLES.tobytes,
    "bytearray": lambda: bytearray(SAMPLES.tobytes()),
    "memoryview of bytes": lambda: memoryview(SAMPLES.tobytes()),
    "ragged": lambda: [[1.0, 2.0], [1.0]], "words": lambda: ["a", "b"],
    "nothing": lambda: [None, None], "huge": lambda: [2**70, 1],
    "dates": lambda: np.array([1, 2], "datetime64[s]"), "bool": lambda: SAMPLES > 0,
    "NaN": lambda: np.full(100, np.nan), "infinity": lambda: np.full(100, np.inf),
    "three dimensions": lambda: np.zeros((2, 3, 4), np.int16),
    "sparse": lambda: torch.from_numpy(SAMPLES).float().to_sparse()}


@pytest.mark.entry("Sp15", "you pass integers as samples, as an array, a list or chunks of a stream", "works",
                   "8, 16 and 32 bits are scaled by their width. Lists of integers, 64 bits, bytes, and 32 bits with the peak of "
                   "16-bit samples are a `DataError` that names `numpy.asarray(samples, 'int16')`.")
@CALLS
@pytest.mark.parametrize("name", SCALED)
def test_every_type_with_a_scale_gives_the_words(recognizer: Recognizer, name: str, call: Callable[..., str]) -> None:
    assert call(recognizer, SCALED[name]()) == " ".join(WORDS)


@pytest.mark.entry("Sp15")
@CALLS
@pytest.mark.parametrize("name", REFUSED)
def test_types_without_a_scale_are_refused(recognizer: Recognizer, name: str, call: Callable[..., str]) -> None:
    audio = REFUSED[name]()
    if call is in_chunks and name == "sparse":
        audio = SAMPLES.astype(np.complex64)
    with pytest.raises(DataError):
        call(recognizer, audio)


@pytest.mark.entry("Sp15")
def test_a_quiet_chunk_of_a_stream_is_no_error(recognizer: Recognizer) -> None:
    loud = np.split(SAMPLES.astype(np.int32) << 16, range(800, len(SAMPLES), 800))
    found = recognizer.stream([np.full(800, 300, np.int32), *loud], partial=False)
    assert " ".join(one.text for one in found) == " ".join(WORDS)


@pytest.mark.entry("Sp15")
@pytest.mark.parametrize(("name", "value"), [
    *(("sample_rate_hz", rate)
      for rate in ("8000", True, float("nan"), 8000.5, [8000], None.__class__)),
    *(("num_best", number) for number in ("2", 0, 1.5, True))])
def test_a_rate_or_number_of_hypotheses_that_is_none_is_refused(
        recognizer: Recognizer, name: str, value: Any, tmp_path: Path) -> None:
    settings = {name: value}
    calls: list[Callable[[], object]] = [lambda: recognizer.transcribe(SAMPLES, **settings),
                                         lambda: list(recognizer.stream([SAMPLES], **settings))]
    if name == "num_best":
        calls.append(lambda: recognizer.transcribe(tmp_path, **settings))
    for call in calls:
        with pytest.raises(ArgumentError, match=name):
            call()


def test_integral_rates_of_other_types_are_accepted(recognizer: Recognizer) -> None:
    rates: list[Any] = [np.int64(8000), 8000.0]
    assert all(recognizer.transcribe(SAMPLES, rate) == recognizer.transcribe(SAMPLES) for rate in rates)
