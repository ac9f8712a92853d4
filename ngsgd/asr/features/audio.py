"""Samples of audio files or parts of them; each error message names the file."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.asr import extras, unpacking
from ngsgd.errors import DataError

# scale of 16-bit samples, as in Kaldi
FULL_SCALE = 32768.0
# maximum excess of a segment over its recording: written times are rounded
_END_TOLERANCE_S = 0.05


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it between two times."""

    path: Path
    # the file:line that names it, for messages
    where: str
    start_s: float = 0.0
    # None: to the end
    end_s: float | None = None


def read(piece: Piece, sample_rate_hz: int) -> npt.NDArray[np.float32]:
    """Read samples of a mono file at 16-bit scale.

    Args:
        piece: file and times.
        sample_rate_hz: required sampling rate.

    Raises:
        DataError: the file is missing, damaged, not mono, or has another sampling rate.
    """
    samples, rate_hz = _read_file(piece)
    if rate_hz != sample_rate_hz:
        raise DataError(f"{piece.where}: {piece.path} is sampled at {rate_hz} Hz, but "
                        f"features.sample_rate_hz is {sample_rate_hz}; resample the audio, or set "
                        f"features.sample_rate_hz={rate_hz}.")
    if piece.end_s is None:
        return samples
    first, end = round(piece.start_s * rate_hz), round(piece.end_s * rate_hz)
    if not 0 <= first < end <= len(samples) + _END_TOLERANCE_S * rate_hz:
        raise DataError(f"{piece.where}: the segment from {piece.start_s:g} to {piece.end_s:g} s "
                        f"exceeds {piece.path}, which lasts {len(samples) / rate_hz:g} s; correct "
                        "the times.")
    return samples[first:end]


def _read_file(piece: Piece) -> tuple[npt.NDArray[np.float32], int]:
    soundfile: Any = extras.load("soundfile", extra="asr", purpose="Reading audio files")
    if not piece.path.is_file():
        raise DataError(f"{piece.where}: {piece.path} does not exist; correct the path, or remove "
                        "the line.")
    try:
        _check_is_whole(piece)
        _check_size(piece, soundfile.info(str(piece.path)).frames)
        samples, rate_hz = soundfile.read(str(piece.path), dtype="float64")
    except (OSError, RuntimeError) as error:
        # soundfile.LibsndfileError is a RuntimeError
        reason = str(error).rpartition(": ")[2].strip().rstrip(".")
        raise DataError(f"{piece.where}: {piece.path} cannot be read as audio ({reason}); replace "
                        "it.") from error
    if samples.ndim != 1:
        raise DataError(f"{piece.where}: {piece.path} has {samples.shape[1]} channels; convert it "
                        "to one channel.")
    if not len(samples):
        raise DataError(f"{piece.where}: {piece.path} contains no samples; replace it, or remove "
                        "the line.")
    return (samples * FULL_SCALE).astype(np.float32), int(rate_hz)


def _check_size(piece: Piece, num_samples: int) -> None:
    # a flac of silence expands 10000 times, and the header of a wav can contain any number
    if not 0 <= 2 * num_samples <= unpacking.limit(piece.path.stat().st_size):
        raise DataError(f"{piece.where}: the header of {piece.path} specifies {num_samples} "
                        "samples, too many for its size; replace it.")


def _check_is_whole(piece: Piece) -> None:
    # libsndfile reads a truncated wav as a shorter one
    try:
        with wave.open(str(piece.path)) as wav:
            promised = wav.getnframes()
            found = len(wav.readframes(promised)) // (wav.getsampwidth() * wav.getnchannels())
    except (wave.Error, EOFError):
        # not a PCM wav: flac, or floating point
        return
    if found < promised:
        raise DataError(f"{piece.where}: {piece.path} is truncated, with {found} of the {promised} "
                        "samples in its header; replace it.")
