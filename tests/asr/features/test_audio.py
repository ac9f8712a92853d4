"""Segments of recordings: the samples of the complete file, in any order, with one check a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from ngsgd.asr.features.audio import Piece, Reader
from ngsgd.asr.recording import AudioFile
from ngsgd.errors import DataError

RATE_HZ = 8000


@pytest.fixture
def samples() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, 2 * RATE_HZ).clip(-1, 1)


@pytest.mark.parametrize(("suffix", "subtype"), [
    ("wav", "PCM_16"), ("wav", "FLOAT"), ("wav", "ULAW"), ("wav", "MS_ADPCM"), ("flac", "PCM_24"), ("ogg", "VORBIS")])
def test_segments_are_parts_of_the_file(tmp_path: Path, samples: np.ndarray, suffix: str, subtype: str) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path, sign in zip(paths, (1, -1), strict=True):
        soundfile.write(path, sign * samples, RATE_HZ, subtype=subtype)
    whole = [Reader(RATE_HZ).read(Piece(path, "wav.scp:1")) for path in paths]
    reader = Reader(RATE_HZ)
    for number, first, end in [(0, 800, 4000), (0, 400, 900), (1, 0, 16000), (0, 15000, 16000), (1, 7, 8)]:
        part = reader.read(Piece(paths[number], "segments:1", first / RATE_HZ, end / RATE_HZ))
        assert np.array_equal(part, whole[number][first:end])


def test_a_recording_stays_open_for_its_segments(tmp_path: Path, samples: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    open_file = AudioFile.open

    def counted(path: Path, name: str) -> AudioFile:
        opened.append(path)
        return open_file(path, name)

    monkeypatch.setattr(AudioFile, "open", counted)
    paths = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for path in paths:
        soundfile.write(path, samples, RATE_HZ)
    reader = Reader(RATE_HZ)
    for number in range(20):
        reader.read(Piece(paths[number // 10], "segments:1", 0.05 * number, 0.05 * number + 0.1))
    assert opened == paths


def test_a_flac_that_was_cut_names_the_segment(tmp_path: Path, samples: np.ndarray) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, samples, RATE_HZ)
    path.write_bytes(path.read_bytes()[:9000])
    reader = Reader(RATE_HZ)
    assert len(reader.read(Piece(path, "segments:1", 0.0, 0.1))) == RATE_HZ // 10
    with pytest.raises(DataError, match="segments:2"):
        reader.read(Piece(path, "segments:2", 1.8, 2.0))
