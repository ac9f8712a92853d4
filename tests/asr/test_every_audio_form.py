"""Each form of audio, complete, truncated and streamed, gives the same samples or a DataError to
training, to files, to streams and to arrays.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from ngsgd.asr import containers, recording
from ngsgd.asr.features.audio import Piece, Reader
from ngsgd.errors import DataError
from tests.asr.audio_forms import FORMS, OTHERS, PLACEHOLDERS, RATE_HZ, Pipe, noise, streamed

Samples = npt.NDArray[np.float32]


def by_training(content: bytes, folder: Path) -> Samples:
    path = folder / "audio"
    path.write_bytes(content)
    return Reader(RATE_HZ).read(Piece(path, "wav.scp:1"))


def by_segments(content: bytes, folder: Path) -> Samples:
    path = folder / "audio"
    path.write_bytes(content)
    reader = Reader(RATE_HZ)
    parts = [reader.read(Piece(path, f"segments:{at}", at / 10, (at + 1) / 10)) for at in range(7)]
    return np.concatenate([*parts, reader.read(Piece(path, "segments:8", 0.7, 0.75))])


def by_file(content: bytes, folder: Path) -> Samples:
    path = folder / "audio"
    path.write_bytes(content)
    with recording.opened(path) as source:
        assert source.sample_rate_hz == RATE_HZ and source.num_channels == 1
        return np.concatenate(list(source.blocks(0.13)))[:, 0]


def by_stream(content: bytes, folder: Path) -> Samples:
    source = recording.of_stream(io.BufferedReader(Pipe(content)), 16000 if content else RATE_HZ)
    assert source.sample_rate_hz == RATE_HZ and source.num_channels == 1
    blocks = list(source.blocks(0.13))
    if not blocks:
        raise DataError("no samples")
    return np.concatenate(blocks)[:, 0]


READERS = [by_training, by_file, by_stream]
READER = pytest.mark.parametrize("read", READERS)
FORM = pytest.mark.parametrize("form", FORMS)


def expected(content: bytes) -> Samples:
    """Samples by libsndfile alone, as an array."""
    return recording.scaled(soundfile.read(io.BytesIO(content), dtype="float32")[0], "an array")


def assert_equal(form: str, found: Samples, samples: Samples) -> None:
    # libmpg123 rounds differently with the size of a block
    tolerance = 0.01 if form == "mp3" else 0.0
    np.testing.assert_allclose(found, samples, rtol=0.0, atol=tolerance)


@pytest.mark.entry("Sp5", "a recording has a length that its writer did not know (0xFFFFFFFF, 0x7FFFF000 or 0), is truncated, or "
                   "comes on stdin as flac, ogg, mp3 or another container", "works",
                   "training, files and stdin use one reader. Samples of a stream end with the file; truncated recordings are a "
                   "`DataError`. Containers on stdin are decoded as files are; formats that are not read (m4a, webm, wma, ...) "
                   "are a `DataError` that names ffmpeg. Only bytes without a known header are raw samples.")
@READER
@FORM
def test_every_reader_gives_the_samples_of_an_array(form: str, read: Callable[[bytes, Path], Samples], tmp_path: Path) -> None:
    content = FORMS[form]()
    found = read(content, tmp_path)
    assert found.dtype == np.float32 and len(found) >= 6000 and found.any()
    assert_equal(form, found, expected(content))


@pytest.mark.entry("Sp5")
@FORM
def test_segments_are_parts_of_every_form(form: str, tmp_path: Path) -> None:
    content = FORMS[form]()
    assert_equal(form, by_segments(content, tmp_path), expected(content)[:6000])


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize("keep", [0.5, 0.999, 0.75, 0.03, 0.002])
@FORM
def test_a_truncated_recording_is_refused(form: str, keep: float, read: Callable[[bytes, Path], Samples], tmp_path: Path) -> None:
    content = FORMS[form]()
    content = content[:len(content) - len(b"LISTxxxxINFO")] if form == "LIST after" else content
    with pytest.raises(DataError):
        read(content[:int(keep * len(content))], tmp_path)


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize("length", PLACEHOLDERS)
@FORM
def test_the_length_of_a_stream_is_that_of_its_bytes(
        form: str, length: int, read: Callable[[bytes, Path], Samples], tmp_path: Path) -> None:
    content = FORMS[form]()
    if form == "LIST after":
        pytest.skip("a stream ends with its samples")
    assert_equal(form, read(streamed(form, content, length), tmp_path), expected(content))


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize("form", ["wav", "extensible", "float", "aiff", "au", "rf64", "w64", "caf"])
def test_a_recording_without_samples_is_refused(form: str, read: Callable[[bytes, Path], Samples], tmp_path: Path) -> None:
    name = {"wav": "WAV", "extensible": "WAVEX", "float": "WAV", "aiff": "AIFF", "au": "AU", "rf64": "RF64", "w64": "W64",
            "caf": "CAF"}[form]
    file = io.BytesIO()
    soundfile.write(file, noise(0), RATE_HZ, format=name, subtype="FLOAT" if form == "float" else "PCM_16")
    with pytest.raises(DataError):
        read(file.getvalue(), tmp_path)


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize("name", OTHERS)
def test_other_containers_are_refused_by_name(name: str, read: Callable[[bytes, Path], Samples], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ffmpeg"):
        read(OTHERS[name], tmp_path)


@pytest.mark.entry("Sp5")
@pytest.mark.parametrize("seed", range(20))
def test_bytes_without_a_header_are_raw_samples_on_a_stream(seed: int) -> None:
    samples = noise(5000, seed)
    # as a frame of mp3 begins
    samples[0] = np.frombuffer(b"\xff\xfb", "<i2")[0]
    source = recording.of_stream(io.BufferedReader(Pipe(samples.tobytes())), RATE_HZ)
    assert np.array_equal(np.concatenate(list(source.blocks()))[:, 0], samples)


@pytest.mark.entry("Sp5")
@READER
def test_nothing_is_refused(read: Callable[[bytes, Path], Samples], tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read(b"", tmp_path)


@pytest.mark.entry("Sp5")
def test_a_wav_is_recognized_while_it_comes() -> None:
    content = FORMS["extensible"]()
    pipe = Pipe(streamed("extensible", content, 0xFFFFFFFF))
    blocks = recording.of_stream(io.BufferedReader(pipe, 700), 16000).blocks(0.05)
    first = next(blocks)
    assert len(first) == 400 and len(pipe.left) > len(content) - 2000


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize("keep", [0.3, 0.9, 1.0])
def test_an_mp3_without_a_length_ends_with_a_complete_frame(
        keep: float, read: Callable[[bytes, Path], Samples], tmp_path: Path) -> None:
    content = FORMS["mp3"]()
    # the first frame holds the length
    content = content[containers.mp3_frame_bytes(content):]
    if keep == 1.0:
        assert len(read(content + b"TAG" + bytes(125), tmp_path)) > 4000
        return
    with pytest.raises(DataError):
        read(content[:int(keep * len(content))], tmp_path)
