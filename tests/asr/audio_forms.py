"""Recordings in every container and encoding, as bytes; and what becomes of their lengths."""

from __future__ import annotations

import functools
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


# name -> bytes
_FORMS = (
    ("wav", "WAV", "PCM_16"), ("extensible", "WAVEX", "PCM_16"), ("float", "WAV", "FLOAT"),
    ("flac", "FLAC", "PCM_16"), ("wav 8", "WAV", "PCM_U8"), ("wav 24", "WAV", "PCM_24"),
    ("wav 32", "WAV", "PCM_32"), ("double", "WAV", "DOUBLE"), ("extensible 24", "WAVEX", "PCM_24"),
    ("extensible float", "WAVEX", "FLOAT"), ("mu-law", "WAV", "ULAW"), ("A-law", "WAV", "ALAW"),
    ("IMA ADPCM", "WAV", "IMA_ADPCM"), ("MS ADPCM", "WAV", "MS_ADPCM"), ("GSM", "WAV", "GSM610"),
    ("RIFX", "WAV", "PCM_16", "BIG"), ("rf64", "RF64", "PCM_16"), ("w64", "W64", "PCM_16"),
    ("aiff", "AIFF", "PCM_16"), ("aiff 24", "AIFF", "PCM_24"), ("aifc float", "AIFF", "FLOAT"),
    ("aifc little", "AIFF", "PCM_16", "LITTLE"), ("au", "AU", "PCM_16"),
    ("au mu-law", "AU", "ULAW"), ("au little", "AU", "PCM_16", "LITTLE"), ("caf", "CAF", "PCM_16"),
    ("sphere", "NIST", "PCM_16"), ("sphere mu-law", "NIST", "ULAW"), ("flac 24", "FLAC", "PCM_24"),
    ("vorbis", "OGG", "VORBIS"), ("opus", "OGG", "OPUS"), ("mp3", "MP3", "MPEG_LAYER_III"))
FORMS: dict[str, Callable[[], bytes]] = {
    name: functools.partial(written, container, subtype, "".join(endian) or "FILE")
    for name, container, subtype, *endian in _FORMS}
FORMS["LIST before"] = lambda: with_chunk_before(written("WAV", "PCM_16"))
FORMS["LIST after"] = lambda: written("WAV", "PCM_16") + b"LIST" + struct.pack("<I", 4) + b"INFO"


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
