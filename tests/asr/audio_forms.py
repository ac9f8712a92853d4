"""Recordings in every container and encoding, as bytes; and what becomes of their lengths."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

RATE_HZ = 8000


class Pipe(io.RawIOBase):
    """A stream that gives some bytes at once, and cannot be read again."""

    def __init__(self, content: bytes, at_once: int = 700) -> None:
        super().__init__()
        self.left, self._at_once = content, at_once

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._at_once, len(self.left))
        buffer[:size], self.left = self.left[:size], self.left[size:]
        return size


def noise(num_samples: int = 6000, seed: int = 0) -> npt.NDArray[np.int16]:
    return np.random.default_rng(seed).normal(0, 3000, num_samples).astype(np.int16)


def written(container: str, subtype: str, endian: str = "FILE", samples: npt.NDArray[np.int16] | None = None) -> bytes:
    file = io.BytesIO()
    samples = noise() if samples is None else samples
    soundfile.write(file, samples / 32768.0 if subtype in ("FLOAT", "DOUBLE") else samples, RATE_HZ, format=container,
                    subtype=subtype, endian=endian)
    return file.getvalue()


def with_chunk_before(wav: bytes) -> bytes:
    """A LIST of odd length between fmt and data."""
    at = wav.index(b"data")
    return wav[:at] + b"LIST" + struct.pack("<I", 5) + b"INFOx\0" + wav[at:]


def with_chunk_after(wav: bytes) -> bytes:
    return wav + b"LIST" + struct.pack("<I", 4) + b"INFO"


# name -> bytes
FORMS: dict[str, Callable[[], bytes]] = {
    "wav": lambda: written("WAV", "PCM_16"),
    "extensible": lambda: written("WAVEX", "PCM_16"),
    "float": lambda: written("WAV", "FLOAT"),
    "flac": lambda: written("FLAC", "PCM_16"),
    "wav 8": lambda: written("WAV", "PCM_U8"),
    "wav 24": lambda: written("WAV", "PCM_24"),
    "wav 32": lambda: written("WAV", "PCM_32"),
    "double": lambda: written("WAV", "DOUBLE"),
    "extensible 24": lambda: written("WAVEX", "PCM_24"),
    "extensible float": lambda: written("WAVEX", "FLOAT"),
    "mu-law": lambda: written("WAV", "ULAW"),
    "A-law": lambda: written("WAV", "ALAW"),
    "IMA ADPCM": lambda: written("WAV", "IMA_ADPCM"),
    "MS ADPCM": lambda: written("WAV", "MS_ADPCM"),
    "GSM": lambda: written("WAV", "GSM610"),
    "RIFX": lambda: written("WAV", "PCM_16", "BIG"),
    "LIST before": lambda: with_chunk_before(written("WAV", "PCM_16")),
    "LIST after": lambda: with_chunk_after(written("WAV", "PCM_16")),
    "rf64": lambda: written("RF64", "PCM_16"),
    "w64": lambda: written("W64", "PCM_16"),
    "aiff": lambda: written("AIFF", "PCM_16"),
    "aiff 24": lambda: written("AIFF", "PCM_24"),
    "aifc float": lambda: written("AIFF", "FLOAT"),
    "aifc little": lambda: written("AIFF", "PCM_16", "LITTLE"),
    "au": lambda: written("AU", "PCM_16"),
    "au mu-law": lambda: written("AU", "ULAW"),
    "au little": lambda: written("AU", "PCM_16", "LITTLE"),
    "caf": lambda: written("CAF", "PCM_16"),
    "sphere": lambda: written("NIST", "PCM_16"),
    "sphere mu-law": lambda: written("NIST", "ULAW"),
    "flac 24": lambda: written("FLAC", "PCM_24"),
    "vorbis": lambda: written("OGG", "VORBIS"),
    "opus": lambda: written("OGG", "OPUS"),
    "mp3": lambda: written("MP3", "MPEG_LAYER_III"),
}


def _patched(content: bytes, at: int, code: str, *values: int) -> bytes:
    patch = struct.pack(code, *values)
    return content[:at] + patch + content[at + len(patch):]


def streamed(name: str, content: bytes, length: int) -> bytes:
    """The recording as a pipe would get it, with a placeholder instead of each length."""
    at = content.find(b"data")
    if content[:4] in (b"RIFF", b"RIFX"):
        code = "<I" if content[:4] == b"RIFF" else ">I"
        return _patched(_patched(content, at + 4, code, length), 4, code, length)
    if content[:4] == b"RF64":
        long = length if length != 0xFFFFFFFF else 2**64 - 1
        return _patched(content, content.index(b"ds64") + 8, "<QQ", long, long)
    if content[:4] == b"riff":
        return _patched(content, at + 16, "<q", length if length != 0xFFFFFFFF else -1)
    if content[:4] == b"FORM":
        return _patched(_patched(content, content.index(b"SSND") + 4, ">I", length), 4, ">I", length)
    if content[:4] in (b".snd", b"dns."):
        return _patched(content, 8, ">I" if content[:1] == b"." else "<I", length)
    if content[:4] == b"caff":
        return _patched(content, at + 4, ">q", -1)
    if content[:4] == b"NIST":
        return content.replace(b"sample_count -i 6000", b"sample_count -i 0000")
    if content[:4] == b"fLaC":
        return _patched(_patched(content, 21, "B", content[21] & 0xF0), 22, ">I", 0)
    # ogg and mp3 have no length
    return content


PLACEHOLDERS = (0xFFFFFFFF, 0x7FFFF000, 0)

# first bytes of containers that are refused by name
OTHERS = {
    "m4a": b"\0\0\0\x20ftypM4A \0\0\0\0" + bytes(range(200)),
    "webm": b"\x1aE\xdf\xa3" + bytes(range(200)),
    "wma": b"0&\xb2u\x8ef\xcf\x11" + bytes(range(200)),
    "amr": b"#!AMR\n" + bytes(range(200)),
    "aac": (b"\xff\xf1\x50\x80\x02\x1f\xfc" + bytes(9)) * 20,
    "avi": b"RIFF" + struct.pack("<I", 300) + b"AVI " + bytes(range(200)),
    "gzip": b"\x1f\x8b\x08\0" + bytes(range(200)),
    "zip": b"PK\x03\x04" + bytes(range(200)),
    "voc": b"Creative Voice File\x1a" + bytes(range(200)),
    "html": b"<!DOCTYPE html><html><head><title>Not found</title></head><body></body></html>" * 3,
    "json": b'{"error": "no such recording", "code": 404, "detail": "the link has expired"}' * 3,
}
