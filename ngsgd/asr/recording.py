"""Block-wise reading of recordings: one function decides about files, streams and arrays.

Training and transcription accept and refuse the same. Letters: N samples, C channels.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ngsgd import files, imports
from ngsgd.asr import containers
from ngsgd.errors import DataError

Samples = npt.NDArray[np.float32]

FULL_SCALE = 32768.0  # scale of 16-bit samples, as in Kaldi
# file suffixes that a folder is searched for
SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".snd", ".sph", ".nist",
            ".caf", ".w64", ".rf64")
LOWEST_RATE_HZ, HIGHEST_RATE_HZ, MAX_CHANNELS = 2000, 768_000, 64
# floating-point samples reach 1.0; a slightly higher peak is a loud recording, not another unit
_LOUDEST = 8.0
# a recording of 32 bits with a lower peak holds 16-bit samples: it would be below their lowest bit
_QUIETEST_OF_32_BITS = 1 << 15
_BLOCK_S = 5.0
_UNKNOWN = 1 << 62  # libsndfile's number of samples if the header has none
_MAX_HEADER_BYTES = 1 << 24  # header of a wav on a stream
# soundfile.LibsndfileError is a RuntimeError
_UNREADABLE = (OSError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError)


@dataclass(frozen=True)
class Recording:
    """An open recording; its name is for messages."""

    name: str
    sample_rate_hz: int
    num_channels: int
    _read: Any

    def blocks(self, seconds: float = _BLOCK_S) -> Iterator[Samples]:
        """Yield N x C samples at 16-bit scale, in order; DataError for a damaged recording."""
        size = max(1, round(seconds * self.sample_rate_hz))
        while len(block_NC := self._read(size)):
            yield scaled(block_NC, self.name)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Recording]:
    """Open a file; DataError if it is missing, not audio, damaged, empty or truncated."""
    with contextlib.closing(AudioFile.open(path)) as file:
        yield Recording(str(path), file.sample_rate_hz, file.num_channels, file.read)


class AudioFile:
    """An open audio file, whose length is compared with its header; `subtype` is the encoding as
    libsndfile names it, and `num_samples` of each channel None if the header has no number.
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        soundfile: Any = imports.load("soundfile", extra="asr", purpose="Reading audio files")
        self.name, self._file, self._num_read = name, file, 0
        try:
            head = file.read(containers.FRAME_BYTES)
            if not head:
                raise DataError(f"{name} is empty; replace or remove it.")
            kind = containers.kind_of(head)
            containers.require_readable(name, kind)
            patches = containers.lengths(name, file, kind)
            file.seek(0)
            self._audio = soundfile.SoundFile(*_for_libsndfile(file, patches))
        except _UNREADABLE as error:
            raise self._error(error) from error
        self.sample_rate_hz: int = self._audio.samplerate
        self.num_channels: int = self._audio.channels
        self.subtype: str = self._audio.subtype
        self.num_samples: int | None = self._audio.frames if self._audio.frames < _UNKNOWN else None
        if self.num_samples is None:
            # soundfile seeks after each read, which libFLAC cannot without a length
            self._audio.seekable = lambda: False
        try:
            check_rate(name, self.sample_rate_hz, self.num_channels)
            if self.num_samples == 0:
                raise DataError(f"{name} contains no samples; replace or remove it.")
        except DataError:
            self._audio.close()
            raise

    @classmethod
    def open(cls, path: Path, name: str = "") -> AudioFile:
        """Open a file by its path, which is also its default name in messages."""
        name = name or str(path)
        if not path.exists():
            raise DataError(f"{name} does not exist; correct the path.")
        try:
            file = files.open_regular(path)
        except OSError as error:
            raise DataError(f"{name} cannot be read ({error.strerror}); replace it.") from error
        try:
            return cls(name, file)
        except BaseException:
            file.close()
            raise

    def read(self, size: int) -> Samples:
        """Read up to `size` samples of each channel, N x C, not scaled."""
        block_NC = self._next(size)
        self._num_read += len(block_NC)
        if not len(block_NC) and not self._num_read:
            raise DataError(f"{self.name} contains no samples; replace or remove it.")
        if not len(block_NC) and self.num_samples is not None and self._num_read < self.num_samples:
            raise DataError(f"{self.name} is truncated: {self._num_read} of the {self.num_samples} samples "
                            "in its header; copy it again.")
        return block_NC

    def part(self, first: int, end: int) -> Samples:
        """Read the samples from `first` to `end` of each channel, N x C, not scaled."""
        part_NC = self._next(end - first, first)
        if len(part_NC) < end - first:
            raise DataError(f"{self.name} ends before sample {end} of the {self.num_samples} in its header; "
                            "copy it again.")
        return part_NC

    def _next(self, size: int, first: int | None = None) -> Samples:
        try:
            if first is not None:
                self._audio.seek(first)
            block_NC: Samples = self._audio.read(size, dtype="float32", always_2d=True)
        except _UNREADABLE as error:
            raise self._error(error) from error
        return block_NC

    def close(self) -> None:
        """Close the file."""
        self._audio.close()
        self._file.close()

    def _error(self, error: Exception) -> DataError:
        reason = str(getattr(error, "strerror", None) or error).rpartition(": ")[2].strip().rstrip(".")
        return DataError(f"{self.name} cannot be read as audio ({reason or type(error).__name__}); replace "
                         "it, or convert it to wav.")


def read_mono(name: str, file: BinaryIO) -> tuple[Samples, int]:
    """Read a file of one channel, at 16-bit scale, and its rate; DataError for other files."""
    with file, contextlib.closing(AudioFile(name, file)) as audio:
        if audio.num_channels != 1:
            raise DataError(f"{name} has {audio.num_channels} channels; convert it to one channel.")
        blocks = []
        while len(block_NC := audio.read(1 << 20)):
            blocks.append(scaled(block_NC[:, 0], name))
        return np.concatenate(blocks), audio.sample_rate_hz


def _for_libsndfile(file: BinaryIO, patches: dict[int, bytes]) -> tuple[Any, ...]:
    """Arguments of SoundFile: a descriptor where there is one, else the file."""
    if patches:
        return (containers.Patched(file, patches),)
    try:
        descriptor = os.dup(file.fileno())
    except (OSError, AttributeError):
        return (file,)
    # the position of the descriptor, which a buffered seek may not change
    os.lseek(descriptor, 0, os.SEEK_SET)
    return (descriptor,)


def scaled(samples: npt.NDArray[Any], name: str) -> Samples:
    """Convert samples to float32 at 16-bit scale; DataError for types and values without one.

    Integers are scaled by their width, floats from -1 to 1 (a peak beyond 8 is an error).
    """
    kind, width = samples.dtype.kind, samples.dtype.itemsize
    if kind == "u" and width == 1:
        return (samples.astype(np.float32) - 128.0) * 256.0
    if kind == "i" and width <= 4:
        scale = np.float32(FULL_SCALE / 2.0 ** (8 * width - 1))
        return np.asarray(samples.astype(np.float32) * scale)
    if kind in "iu":
        raise DataError(f"{name} has samples of the type {samples.dtype}, which no audio has, so their "
                        "scale is unknown (a list of integers has it, too); convert samples of 16 bits by "
                        "numpy.asarray(samples, 'int16').")
    if kind != "f":
        raise DataError(f"{name} has samples of the type {samples.dtype}; pass integers or floating-point "
                        "numbers.")
    peak = float(np.abs(samples).max(initial=0.0))
    # also false for NaN
    if not peak <= _LOUDEST:
        raise DataError(f"{name} has floating-point samples up to {peak:g}; they must be finite and within "
                        f"-1 to 1: divide samples of 16-bit scale by {FULL_SCALE:g}, or replace the recording.")
    return np.asarray(samples * FULL_SCALE, dtype=np.float32)


def peak_of_32_bits(samples: npt.NDArray[Any]) -> int:
    """Peak of integers of 32 bits; 0 for other types."""
    if samples.dtype.kind != "i" or samples.dtype.itemsize != 4 or not samples.size:
        return 0
    return max(int(samples.max()), -int(samples.min()))


def check_peak_of_32_bits(peak: int, name: str) -> None:
    """Raise DataError for 16-bit samples in integers of 32 bits."""
    if 0 < peak < _QUIETEST_OF_32_BITS:
        raise DataError(f"{name} has 32-bit integers with a peak of {peak}, below the lowest bit of 16-bit "
                        "audio; convert samples of 16 bits by numpy.asarray(samples, 'int16').")


def check_rate(name: str, sample_rate_hz: int, num_channels: int = 1) -> None:
    """Raise DataError for an implausible sampling rate or number of channels."""
    is_rate = LOWEST_RATE_HZ <= sample_rate_hz <= HIGHEST_RATE_HZ
    if not is_rate or not 1 <= num_channels <= MAX_CHANNELS:
        raise DataError(f"{name} has {num_channels} channels at {sample_rate_hz} Hz; use 1 to {MAX_CHANNELS} "
                        f"channels at {LOWEST_RATE_HZ} to {HIGHEST_RATE_HZ} Hz.")


class Resampler:
    """Changes the sampling rate of one channel, block by block, unless the two are equal."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._stream: Any = None
        if from_hz != to_hz:
            soxr: Any = imports.load("soxr", extra="asr", purpose="Resampling")
            self._stream = soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32")

    def accept(self, samples_N: Samples, *, is_last: bool = False) -> Samples:
        """Return the samples that are complete; after the last ones, all."""
        if self._stream is None:
            return samples_N
        return np.asarray(self._stream.resample_chunk(np.ascontiguousarray(samples_N), last=is_last))


_STREAM = "the stream on stdin"


def of_stream(stream: io.BufferedReader, raw_rate_hz: int) -> Recording:
    """Read a recording from a pipe: a file of a supported format, or raw samples.

    A wav is read while it comes; other formats are copied to a temporary file first. Raw samples
    are mono, 16 bits, little-endian, at `raw_rate_hz`. Raises DataError for others and damaged
    headers.
    """
    source = _Stream(stream)
    head = source.peek(containers.HEAD_BYTES)
    if containers.may_be_frames(head):
        head = source.peek(containers.FRAME_BYTES)
    kind = containers.kind_of(head)
    if not kind:
        return Recording("-", raw_rate_hz, 1, lambda size: _numbers(source.read(2 * size), "<i2", 1))
    containers.require_readable(_STREAM, kind)
    live = _live_wav(source) if kind == "wav" and head[:4] == b"RIFF" else None
    if live:
        return live
    audio = AudioFile(_STREAM, source.copied())
    return Recording(_STREAM, audio.sample_rate_hz, audio.num_channels, audio.read)


class _Stream:
    """A stream whose bytes so far can be read again until `release`."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream, self._seen, self._at, self._is_kept = stream, bytearray(), 0, True

    def peek(self, size: int) -> bytes:
        content = self.read(size)
        self._at -= len(content)
        return content

    def read(self, size: int) -> bytes:
        """Read `size` bytes, or fewer at the end."""
        content = bytes(self._seen[self._at:self._at + size])
        if len(content) < size and (more := self._stream.read(size - len(content))):
            content += more
            if self._is_kept:
                self._seen += more
        self._at += len(content)
        return content

    def seek(self, offset: int) -> int:
        if offset > _MAX_HEADER_BYTES:
            raise ValueError("the header is too long")
        if offset > self._at:
            self.read(offset - self._at)
        self._at = min(offset, len(self._seen))
        return self._at

    def tell(self) -> int:
        return self._at

    def release(self) -> None:
        """Keep no more bytes."""
        self._is_kept = False

    def copied(self) -> BinaryIO:
        """Return all bytes from the beginning in an unnamed temporary file."""
        copy: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the recording
        try:
            copy.write(self._seen)
            shutil.copyfileobj(self._stream, copy)
            copy.seek(0)
        except OSError as error:
            raise DataError(f"{_STREAM} cannot be copied to a temporary file ({error.strerror or error}); "
                            "free disk space, or set TMPDIR to another folder.") from error
        return copy


def _live_wav(source: _Stream) -> Recording | None:
    """Return a wav whose samples are plain numbers; None for others."""
    try:
        encoding = containers.wav_encoding(source)
        source.seek(0)
        found = containers.find_samples(source, "wav")
    except ValueError:
        return None
    if encoding is None or found is None:
        return None
    dtype, num_channels, rate_hz = encoding
    check_rate(_STREAM, rate_hz, num_channels)
    source.seek(found.begin)
    source.release()
    # bytes of samples; None: all
    left, is_cut = found.length, False

    def read(size: int) -> npt.NDArray[Any]:
        nonlocal left, is_cut
        if is_cut:
            raise DataError(f"{_STREAM} is truncated: the last {left} bytes of samples in its "
                            "header are missing; send it again.")
        wanted = size * num_channels * int(dtype[-1])
        content = source.read(wanted if left is None else min(wanted, left))
        if left is not None:
            is_cut = len(content) < min(wanted, left)
            left -= len(content)
        samples_NC = _numbers(content, dtype, num_channels)
        # the samples before the end are recognized first
        return samples_NC if len(samples_NC) or not is_cut else read(size)
    return Recording(_STREAM, rate_hz, num_channels, read)


def _numbers(content: bytes, dtype: str, num_channels: int) -> npt.NDArray[Any]:
    """Convert bytes to N x C samples; an incomplete one at the end is dropped."""
    frame_bytes = num_channels * int(dtype[-1])
    content = content[:len(content) // frame_bytes * frame_bytes]
    if dtype == "<i3":
        # the lowest of four bytes is 0
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return padded.view("<i4").reshape(-1, num_channels)
    return np.frombuffer(content, dtype).reshape(-1, num_channels)
