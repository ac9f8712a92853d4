"""Samples of audio files or parts of them; each error names the line of the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ngsgd.asr import unpacking
from ngsgd.asr.recording import AudioFile, Resampler, Samples, scaled
from ngsgd.errors import DataError

# maximum excess of a segment over its recording: written times are rounded
_END_TOLERANCE_S = 0.05
# subtypes of libsndfile in which it finds a sample by its number; also those of flac
_SEEKABLE = frozenset({"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"})
_BLOCK = 1 << 20  # samples of each channel that are read at once


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it between two times."""

    path: Path
    where: str  # file:line that names it, for messages
    start_s: float = 0.0
    end_s: float | None = None  # None: to the end
    channel: int | None = None  # from 0; None: the only one
    # channel if the file has several, where a table names one for other files as well
    side: int | None = None
    rate_hz: int | None = None  # that the data give for the file; None: unknown
    num_channels: int | None = None


class Reader:
    """Reads one channel of files, or parts of them, as samples at 16-bit scale.

    The last recording stays open, so that a segment does not cost the length of its recording; only
    formats without access by number are read completely. Other rates: an error unless `resample`.
    """

    def __init__(self, sample_rate_hz: int, *, resample: bool = False) -> None:
        self._sample_rate_hz, self._resample = sample_rate_hz, resample
        self._path: Path | None = None
        self._file: AudioFile | None = None
        # N x C of a file that is read completely
        self._samples_NC: Samples | None = None

    def read(self, piece: Piece) -> Samples:
        """Return the samples; DataError for a bad file, another rate or channels, wrong times."""
        name = f"{piece.where}: {piece.path}"
        if piece.path != self._path or piece.end_s is None or self._file is None:
            self.close()
            if not piece.path.is_file():
                raise DataError(f"{name} does not exist; correct the path (relative names start in the "
                                "folder of the table), or remove the line.")
            self._file, self._path = AudioFile.open(piece.path, name), piece.path
        file = self._file
        file.name = name
        channel, rate_hz = _channel(piece, file, name), file.sample_rate_hz
        if piece.rate_hz not in (None, rate_hz):
            raise DataError(f"{name} is sampled at {rate_hz} Hz, but at {piece.rate_hz} Hz in its manifest; "
                            "write the manifest again.")
        if rate_hz != self._sample_rate_hz and not self._resample:
            raise DataError(f"{name} is sampled at {rate_hz} Hz, but features.sample_rate_hz is "
                            f"{self._sample_rate_hz}; set features.resample=true, or "
                            f"features.sample_rate_hz={rate_hz}.")
        if self._samples_NC is None and (file.subtype not in _SEEKABLE or file.num_samples is None):
            self._samples_NC = _all(piece, file, name)
        num = file.num_samples if self._samples_NC is None else len(self._samples_NC)
        assert num is not None
        first = round(piece.start_s * rate_hz)
        end = num if piece.end_s is None else round(piece.end_s * rate_hz)
        if not 0 <= first < end <= num + _END_TOLERANCE_S * rate_hz:
            raise DataError(f"{piece.where}: the segment from {piece.start_s:g} to "
                            f"{piece.end_s:g} s exceeds {piece.path}, which lasts "
                            f"{num / rate_hz:g} s; correct the times.")
        part_NC = self._samples_NC[first:end] if self._samples_NC is not None else file.part(first, min(end, num))
        return Resampler(rate_hz, self._sample_rate_hz).accept(scaled(part_NC[:, channel], name), is_last=True)

    def close(self) -> None:
        """Close the open recording."""
        if self._file is not None:
            self._file.close()
        self._path = self._file = self._samples_NC = None


def _channel(piece: Piece, file: AudioFile, name: str) -> int:
    if piece.num_channels not in (None, file.num_channels):
        raise DataError(f"{name} has {file.num_channels} channels, but {piece.num_channels} in its manifest; "
                        "write the manifest again.")
    channel = piece.channel
    if channel is None:
        channel = piece.side if file.num_channels > 1 else 0
    if channel is None:
        raise DataError(f"{name} has {file.num_channels} channels; convert it to one channel, or "
                        "name the channel in the fifth column of segments (from 0) or in "
                        "reco2file_and_channel.")
    if channel >= file.num_channels:
        raise DataError(f"{name} has {file.num_channels} channel(s), but the channel {channel} (from 0) is "
                        "wanted; correct the channel.")
    return channel


def _all(piece: Piece, file: AudioFile, name: str) -> Samples:
    # a flac of silence expands 10000 times, and a header can contain any number
    most = unpacking.limit(piece.path.stat().st_size) // 2
    if (file.num_samples or 0) * file.num_channels > most:
        raise DataError(f"{name} has a header with {file.num_samples} samples, too many for its size; replace "
                        "it.")
    blocks, num = [], 0
    while len(block_NC := file.read(_BLOCK)):
        blocks.append(block_NC)
        num += block_NC.size
        if num > most:
            raise DataError(f"{name} expands to too many samples for its size; replace it.")
    return np.concatenate(blocks)
