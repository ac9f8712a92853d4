"""Block-wise reading of recordings in all formats of libsndfile.

Errors are DataErrors with the name of the recording. Letters: N samples, C channels.
"""

from __future__ import annotations

import io
import os
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr import extras
from ngsgd.asr.features.audio import FULL_SCALE
from ngsgd.errors import DataError

Samples = npt.NDArray[np.float32]

# file suffixes that a folder is searched for
SUFFIXES = (
    ".wav",
    ".flac",
    ".ogg",
    ".oga",
    ".opus",
    ".mp3",
    ".aif",
    ".aiff",
    ".au",
    ".snd",
    ".sph",
    ".nist",
    ".caf",
    ".w64",
    ".rf64",
)
LOWEST_RATE_HZ, HIGHEST_RATE_HZ, MAX_CHANNELS = 2000, 768_000, 64
# floating-point samples reach 1.0; a slightly higher peak is a loud recording, not another unit
_LOUDEST = 8.0
_BLOCK_S = 5.0
# placeholder for a size that the writer to a pipe could not determine
_UNKNOWN_BYTES = 0x7FFF0000
_MAX_CHUNKS = 1000
# soundfile.LibsndfileError is a RuntimeError
_UNREADABLE = (OSError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError)


@dataclass(frozen=True)
class Recording:
    """An open recording.

    Attributes:
        name: for messages.
        sample_rate_hz: from the header.
        num_channels: number of channels.
    """

    name: str
    sample_rate_hz: int
    num_channels: int
    _read: Any

    def blocks(self, seconds: float = _BLOCK_S) -> Iterator[Samples]:
        """Yield N x C samples at 16-bit scale, in order.

        Raises:
            DataError: the recording is damaged or truncated.
        """
        size = max(1, round(seconds * self.sample_rate_hz))
        while len(block_NC := self._read(size)):
            yield scaled(block_NC, self.name)


@contextmanager
def opened(path: Path) -> Iterator[Recording]:
    """Open an audio file.

    Raises:
        DataError: the file is missing, not an audio file, damaged, empty or truncated.
    """
    file = _File(path)
    try:
        yield Recording(str(path), file.audio.samplerate, file.audio.channels, file.read)
    finally:
        file.audio.close()


class _File:
    """An open audio file, whose length is compared with its header."""

    def __init__(self, path: Path) -> None:
        soundfile: Any = extras.load("soundfile", extra="asr", purpose="Reading audio files")
        self._path, self._num_read = path, 0
        if not path.exists():
            raise DataError(f"{path} does not exist; correct the path.")
        try:
            with files.open_regular(path) as file:
                _check_is_whole(path, file)
                # a descriptor: with a name, the suffix would determine the format
                self.audio = soundfile.SoundFile(os.dup(file.fileno()), closefd=True)
        except _UNREADABLE as error:
            raise self._error(error) from error
        check_rate(str(path), self.audio.samplerate, self.audio.channels)
        if self.audio.frames == 0:
            raise DataError(f"{path} contains no samples; replace or remove it.")

    def read(self, size: int) -> Samples:
        """Read up to `size` samples of each channel, N x C."""
        try:
            block_NC: Samples = self.audio.read(size, dtype="float32", always_2d=True)
        except _UNREADABLE as error:
            raise self._error(error) from error
        self._num_read += len(block_NC)
        if not len(block_NC) and self._num_read < self.audio.frames:
            raise DataError(
                f"{self._path} is truncated: {self._num_read} of the {self.audio.frames} samples "
                "in its header; copy it again."
            )
        return block_NC

    def _error(self, error: Exception) -> DataError:
        reason = (
            str(getattr(error, "strerror", None) or error).rpartition(": ")[2].strip().rstrip(".")
        )
        return DataError(
            f"{self._path} cannot be read as audio ({reason or type(error).__name__}); replace it, "
            "or convert it to wav."
        )


def scaled(samples: npt.NDArray[Any], name: str) -> Samples:
    """Convert samples to float32 at 16-bit scale.

    Integers are scaled by their width, floating-point numbers from the range -1 to 1.

    Raises:
        DataError: samples are not finite, or beyond 8.
    """
    if samples.dtype.kind == "u" and samples.dtype.itemsize == 1:
        return (samples.astype(np.float32) - 128.0) * 256.0
    if samples.dtype.kind == "i":
        return np.asarray(
            samples.astype(np.float32)
            * np.float32(FULL_SCALE / 2.0 ** (8 * samples.dtype.itemsize - 1))
        )
    if samples.dtype.kind != "f":
        raise DataError(
            f"{name} has samples of the type {samples.dtype}; pass integers or floating-point "
            "numbers."
        )
    peak = float(np.abs(samples).max(initial=0.0))
    # also false for NaN
    if not peak <= _LOUDEST:
        raise DataError(
            f"{name} has floating-point samples up to {peak:g}; they must be finite and within -1 "
            f"to 1: divide samples of 16-bit scale by {FULL_SCALE:g}, or replace the recording."
        )
    return np.asarray(samples * FULL_SCALE, dtype=np.float32)


def check_rate(name: str, sample_rate_hz: int, num_channels: int = 1) -> None:
    """Raise DataError for an implausible sampling rate or number of channels."""
    if (
        not LOWEST_RATE_HZ <= sample_rate_hz <= HIGHEST_RATE_HZ
        or not 1 <= num_channels <= MAX_CHANNELS
    ):
        raise DataError(
            f"{name} has {num_channels} channels at {sample_rate_hz} Hz; use 1 to {MAX_CHANNELS} "
            f"channels at {LOWEST_RATE_HZ} to {HIGHEST_RATE_HZ} Hz."
        )


def _check_is_whole(path: Path, file: BinaryIO) -> None:
    """Raise DataError for a truncated wav, which libsndfile reads as a shorter one.

    The file is at its start afterwards.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        if not size:
            raise DataError(f"{path} is empty; replace or remove it.")
        if file.read(4) != b"RIFF" or file.seek(8) != 8 or file.read(4) != b"WAVE":
            return
        for _ in range(_MAX_CHUNKS):
            header = file.read(8)
            length = int.from_bytes(header[4:], "little")
            if len(header) < 8:
                return
            if header[:4] == b"data":
                found = size - file.tell()
                if found < length < _UNKNOWN_BYTES:
                    raise DataError(
                        f"{path} is truncated: {found} of the {length} bytes of samples in its "
                        "header; copy it again."
                    )
                return
            file.seek(length + length % 2, 1)
    finally:
        file.seek(0)
        # the position of the descriptor, which a buffered seek may not change
        os.lseek(file.fileno(), 0, os.SEEK_SET)


# Streams ------------------------------------------------------------------------------------------


def of_stream(stream: io.BufferedReader, raw_rate_hz: int) -> Recording:
    """Read a recording from a pipe: an integer wav, or raw single-channel 16-bit samples.

    Raw samples are little-endian.

    Args:
        stream: for example `sys.stdin.buffer`.
        raw_rate_hz: sampling rate of samples without a header.
    """
    if stream.peek(4)[:4] != b"RIFF":
        return Recording("-", raw_rate_hz, 1, lambda size: _integers(stream.read(2 * size), 2, 1))
    try:
        wav = wave.open(stream)  # noqa: SIM115 - the caller's stream stays open
        width, num_channels, rate_hz = wav.getsampwidth(), wav.getnchannels(), wav.getframerate()
    except (wave.Error, EOFError) as error:
        raise DataError(
            f"the stream has a wav header that cannot be read ({str(error) or 'it is truncated'}); "
            "send an integer wav, or raw 16-bit samples."
        ) from error
    check_rate("the stream", rate_hz, num_channels)
    return Recording(
        "-",
        rate_hz,
        num_channels,
        lambda size: _integers(wav.readframes(size), width, num_channels),
    )


def _integers(content: bytes, width: int, num_channels: int) -> npt.NDArray[Any]:
    """Convert bytes to N x C samples; an incomplete one at the end is dropped."""
    content = content[: len(content) // (width * num_channels) * (width * num_channels)]
    if width == 3:
        # the lowest of four bytes is 0
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return padded.view("<i4").reshape(-1, num_channels)
    return np.frombuffer(content, {1: "u1", 2: "<i2", 4: "<i4"}[width]).reshape(-1, num_channels)
