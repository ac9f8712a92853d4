"""Each form of audio, complete, truncated, streamed and in segments: the samples or a DataError."""

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
Read = Callable[[bytes, Path], Samples]


def by_training(content: bytes, folder: Path) -> Samples:
    (folder / "audio").write_bytes(content)
    return Reader(RATE_HZ).read(Piece(folder / "audio", "wav.scp:1"))


def by_segments(content: bytes, folder: Path) -> Samples:
    (folder / "audio").write_bytes(content)
    reader = Reader(RATE_HZ)
    times = [*((at / 10, (at + 1) / 10) for at in range(7)), (0.7, 0.75)]
    return np.concatenate([reader.read(Piece(folder / "audio", "segments:1", *time))
                           for time in times])


def by_file(content: bytes, folder: Path) -> Samples:
    (folder / "audio").write_bytes(content)
    with recording.opened(folder / "audio") as source:
        assert source.sample_rate_hz == RATE_HZ and source.num_channels == 1
        return np.concatenate(list(source.blocks(0.13)))[:, 0]


def by_stream(content: bytes, folder: Path) -> Samples:
    source = recording.of_stream(io.BufferedReader(Pipe(content)), 16000 if content else RATE_HZ)
    assert source.sample_rate_hz == RATE_HZ and source.num_channels == 1
    blocks = list(source.blocks(0.13))
    if not blocks:
        raise DataError("no samples")
    return np.concatenate(blocks)[:, 0]


READER = pytest.mark.parametrize("read", [by_training, by_file, by_stream])
FORM = pytest.mark.parametrize("form", FORMS)


def expected(content: bytes) -> Samples:
    """Samples by libsndfile alone, as an array."""
    return recording.scaled(soundfile.read(io.BytesIO(content), dtype="float32")[0], "an array")


def assert_equal(form: str, found: Samples, samples: Samples) -> None:
    # libmpg123 rounds differently with the size of a block
    np.testing.assert_allclose(found, samples, rtol=0.0, atol=0.01 if form == "mp3" else 0.0)


@pytest.mark.entry("Sp5", "a recording has a length that its writer did not know (0xFFFFFFFF, 0x7FFFF000 or 0), is truncated, or "
                   "comes on stdin as flac, ogg, mp3 or another container", "works",
                   "training, files and stdin use one reader. Samples of a stream end with the file; truncated recordings are a "
                   "`DataError`. Containers on stdin are decoded as files are; formats that are not read (m4a, webm, wma, ...) "
                   "are a `DataError` that names ffmpeg. Only bytes without a known header are raw samples.")
@READER
@FORM
def test_every_reader_gives_the_samples_of_an_array(form: str, read: Read, tmp_path: Path) -> None:
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
def test_a_truncated_recording_is_refused(
        form: str, keep: float, read: Read, tmp_path: Path) -> None:
    content = FORMS[form]()
    content = content[:len(content) - len(b"LISTxxxxINFO")] if form == "LIST after" else content
    with pytest.raises(DataError):
        read(content[:int(keep * len(content))], tmp_path)


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize("length", PLACEHOLDERS)
@FORM
def test_the_length_of_a_stream_is_that_of_its_bytes(
        form: str, length: int, read: Read, tmp_path: Path) -> None:
    content = FORMS[form]()
    if form == "LIST after":
        pytest.skip("a stream ends with its samples")
    assert_equal(form, read(streamed(form, content, length), tmp_path), expected(content))


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize(("name", "subtype"), [
    *((name, "PCM_16") for name in ("WAV", "WAVEX", "AIFF", "AU", "RF64", "W64", "CAF")),
    ("WAV", "FLOAT")])
def test_a_recording_without_samples_is_refused(
        name: str, subtype: str, read: Read, tmp_path: Path) -> None:
    file = io.BytesIO()
    soundfile.write(file, noise(0), RATE_HZ, format=name, subtype=subtype)
    with pytest.raises(DataError):
        read(file.getvalue(), tmp_path)


@pytest.mark.entry("Sp5")
@READER
@pytest.mark.parametrize("name", OTHERS)
def test_other_containers_are_refused_by_name(name: str, read: Read, tmp_path: Path) -> None:
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
def test_nothing_is_refused(read: Read, tmp_path: Path) -> None:
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
        keep: float, read: Read, tmp_path: Path) -> None:
    content = FORMS["mp3"]()
    # the first frame holds the length
    content = content[containers.mp3_frame_bytes(content):]
    if keep == 1.0:
        assert len(read(content + b"TAG" + bytes(125), tmp_path)) > 4000
        return
    with pytest.raises(DataError):
        read(content[:int(keep * len(content))], tmp_path)


@pytest.fixture
def samples() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, 2 * RATE_HZ).clip(-1, 1)


@pytest.mark.parametrize(("suffix", "subtype"), [
    ("wav", "PCM_16"), ("wav", "FLOAT"), ("wav", "ULAW"), ("wav", "MS_ADPCM"), ("flac", "PCM_24"),
    ("ogg", "VORBIS")])
def test_segments_in_any_order_are_parts_of_the_file(
        tmp_path: Path, samples: np.ndarray, suffix: str, subtype: str) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path, sign in zip(paths, (1, -1), strict=True):
        soundfile.write(path, sign * samples, RATE_HZ, subtype=subtype)
    whole = [Reader(RATE_HZ).read(Piece(path, "wav.scp:1")) for path in paths]
    reader = Reader(RATE_HZ)
    for number, first, end in [(0, 800, 4000), (0, 400, 900), (1, 0, 16000), (0, 15000, 16000),
                               (1, 7, 8)]:
        part = reader.read(Piece(paths[number], "segments:1", first / RATE_HZ, end / RATE_HZ))
        assert np.array_equal(part, whole[number][first:end])


def test_a_flac_that_was_cut_names_the_segment(tmp_path: Path, samples: np.ndarray) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, samples, RATE_HZ)
    path.write_bytes(path.read_bytes()[:9000])
    reader = Reader(RATE_HZ)
    assert len(reader.read(Piece(path, "segments:1", 0.0, 0.1))) == RATE_HZ // 10
    with pytest.raises(DataError, match="segments:2"):
        reader.read(Piece(path, "segments:2", 1.8, 2.0))
