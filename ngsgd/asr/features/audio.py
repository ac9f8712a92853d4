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
# samples that are checked at once
_BLOCK = 1 << 20
# subtypes of libsndfile in which it finds a sample by its number; also those of flac
_SEEKABLE = frozenset({"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"})


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it between two times."""

    path: Path
    # the file:line that names it, for messages
    where: str
    start_s: float = 0.0
    # None: to the end
    end_s: float | None = None


class Reader:
    """Reads mono files, or parts of them, as samples at 16-bit scale.

    The recording that was read last stays open, so that the time of a segment does not depend on
    the length of its recording. Only formats in which no sample is found by its number are read
    completely, once for the segments that follow each other.

    Args:
        sample_rate_hz: required sampling rate.
    """

    def __init__(self, sample_rate_hz: int) -> None:
        self._sample_rate_hz = sample_rate_hz
        self._path: Path | None = None
        self._checked: set[Path] = set()
        # an open SoundFile
        self._file: Any = None
        # of a file that is read completely
        self._samples: npt.NDArray[np.float64] | None = None

    def read(self, piece: Piece) -> npt.NDArray[np.float32]:
        """Return the samples of a file or segment.

        Raises:
            DataError: the file is missing, damaged, not mono, or has another sampling rate; the
                segment exceeds it.
        """
        if piece.path != self._path or piece.end_s is None:
            self.close()
            self._open(piece)
            self._path = piece.path
        num, rate_hz = self._file.frames, self._sample_rate_hz
        first = round(piece.start_s * rate_hz)
        end = num if piece.end_s is None else round(piece.end_s * rate_hz)
        if not 0 <= first < end <= num + _END_TOLERANCE_S * rate_hz:
            raise DataError(f"{piece.where}: the segment from {piece.start_s:g} to "
                            f"{piece.end_s:g} s exceeds {piece.path}, which lasts "
                            f"{num / rate_hz:g} s; correct the times.")
        return (self._part(piece, first, min(end, num)) * FULL_SCALE).astype(np.float32)

    def close(self) -> None:
        """Close the open recording."""
        if self._file is not None:
            self._file.close()
        self._path = self._file = self._samples = None

    def _open(self, piece: Piece) -> None:
        soundfile: Any = extras.load("soundfile", extra="asr", purpose="Reading audio files")
        if not piece.path.is_file():
            raise DataError(f"{piece.where}: {piece.path} does not exist; correct the path, or "
                            "remove the line.")
        try:
            if piece.path not in self._checked:
                check_is_whole(piece)
            self._checked.add(piece.path)
            self._file = soundfile.SoundFile(str(piece.path))
        except (OSError, RuntimeError) as error:
            raise _unreadable(piece, error) from error
        _check_size(piece, self._file.frames)
        if self._file.channels != 1:
            raise DataError(f"{piece.where}: {piece.path} has {self._file.channels} channels; "
                            "convert it to one channel.")
        if not self._file.frames:
            raise DataError(f"{piece.where}: {piece.path} contains no samples; replace it, or "
                            "remove the line.")
        if self._file.samplerate != self._sample_rate_hz:
            raise DataError(f"{piece.where}: {piece.path} is sampled at {self._file.samplerate} "
                            f"Hz, but features.sample_rate_hz is {self._sample_rate_hz}; resample "
                            "the audio, or set "
                            f"features.sample_rate_hz={self._file.samplerate}.")

    def _part(self, piece: Piece, first: int, end: int) -> npt.NDArray[np.float64]:
        try:
            if self._samples is None and self._file.subtype not in _SEEKABLE:
                self._samples = self._file.read(dtype="float64")
            if self._samples is not None:
                found: npt.NDArray[np.float64] = self._samples[first:end]
            else:
                self._file.seek(first)
                found = self._file.read(end - first, dtype="float64")
        except (OSError, RuntimeError) as error:
            raise _unreadable(piece, error) from error
        if len(found) < end - first:
            raise DataError(f"{piece.where}: {piece.path} ends before sample {end} of the "
                            f"{self._file.frames} in its header; replace it.")
        return found


def _unreadable(piece: Piece, error: Exception) -> DataError:
    # soundfile.LibsndfileError is a RuntimeError
    reason = str(error).rpartition(": ")[2].strip().rstrip(".")
    return DataError(f"{piece.where}: {piece.path} cannot be read as audio ({reason}); replace it.")


def _check_size(piece: Piece, num_samples: int) -> None:
    # a flac of silence expands 10000 times, and the header of a wav can contain any number
    if not 0 <= 2 * num_samples <= unpacking.limit(piece.path.stat().st_size):
        raise DataError(f"{piece.where}: the header of {piece.path} specifies {num_samples} "
                        "samples, too many for its size; replace it.")


def check_is_whole(piece: Piece) -> None:
    """Raise DataError for a truncated wav, which libsndfile reads as a shorter one."""
    try:
        with wave.open(str(piece.path)) as wav:
            promised, width = wav.getnframes(), wav.getsampwidth() * wav.getnchannels()
            found = 0
            while block := wav.readframes(_BLOCK):
                found += len(block) // width
    except (wave.Error, EOFError):
        # not a PCM wav: flac, or floating point
        return
    if found < promised:
        raise DataError(f"{piece.where}: {piece.path} is truncated, with {found} of the {promised} "
                        "samples in its header; replace it.")
