"""Containers of audio: which one a file is, whether it is complete, and lengths of streams.

libsndfile reads a truncated wav, aiff or au as a shorter one, and a length that the writer to a
pipe could not know as no samples. The headers are therefore read here first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from ngsgd.errors import DataError

READABLE = "wav, flac, ogg, opus, mp3, aiff, au, caf, sphere, w64 and rf64"
# first bytes that `kind_of` needs; frames of mp3 and aac are compared with the next one
HEAD_BYTES, FRAME_BYTES = 64, 8192
# offset, bytes, kind; the kinds that are read
_READ = ((0, b"RF64", "rf64"), (0, b"BW64", "rf64"), (0, b"riff\x2e\x91\xcf\x11", "w64"), (0, b".snd", "au"), (0, b"dns.", "au"),
         (0, b"caff", "caf"), (0, b"NIST_1A", "sphere"), (0, b"fLaC", "flac"), (0, b"OggS", "ogg"), (0, b"ID3", "mp3"))
# and others, which are named in the error
_OTHERS = (
    (4, b"ftyp", "mp4, m4a or mov"), (4, b"moov", "mov"), (4, b"mdat", "mov"), (0, b"\x1aE\xdf\xa3", "webm or matroska"),
    (0, b"0&\xb2u", "wma"), (0, b"#!AMR", "amr"), (0, b"wvpk", "wavpack"), (0, b"MAC ", "ape"), (0, b"TTA1", "tta"),
    (0, b"MPCK", "musepack"), (0, b"MP+", "musepack"), (0, b"ADIF", "aac"), (0, b"DSD ", "dsf"), (0, b"FRM8", "dff"),
    (0, b"Creative Voice File", "voc"), (0, b"MThd", "midi"), (0, b"#EXTM3U", "m3u"), (0, b"\x1f\x8b\x08", "gzip"),
    (0, b"PK\x03\x04", "zip"), (0, b"BZh", "bzip2"), (0, b"\xfd7zXZ\0", "xz"), (0, b"(\xb5/\xfd", "zstandard"), (0, b"%PDF", "pdf"))
# lengths that writers to a pipe give (sox, ffmpeg, arecord): they do not know the real one
_PLACEHOLDERS = (range(0x7EFF0000, 0x7F010000), range(0x7FFF0000, 0x80010000), range(0xFFFF0000, 1 << 32))
_MAX_CHUNKS = 1000
_SHORTEST_HEADER = 12  # shorter files are not compared with the content of a header
# chunks that may follow those of the samples in a wav without samples
_TAGS = b"LISTid3 ID3 cue smplbextfactPEAKJUNKPAD iXML_PMXafsp"
_AFTER_SAMPLES = [_TAGS[at:at + 4] for at in range(0, len(_TAGS), 4)]
# code of a wav whose real code follows, and the rest of that code
_EXTENSIBLE, _REST_OF_CODE = 0xFFFE, bytes.fromhex("000000001000800000aa00389b71")
# code (integers or floating point) and bits of a sample -> type
_PLAIN = {(1, 8): "|u1", (1, 16): "<i2", (1, 24): "<i3", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}
_MAX_OGG_PAGE = 65307
_END_OF_STREAM = 4


class Source(Protocol):
    """A file, or a stream that can be read forward."""

    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...
    def tell(self) -> int: ...


@dataclass(frozen=True)
class Samples:
    """Position and length of encoded samples; length None: unknown, they end with the file.

    `field` is position and width of the length in the header, in the byte order `order`.
    """

    begin: int
    length: int | None
    field: tuple[int, int] = (0, 0)
    order: str = "little"


def kind_of(head: bytes) -> str:
    """The container by its first `HEAD_BYTES` (`FRAME_BYTES` if `may_be_frames`), or nothing."""
    if head[:4] in (b"RIFF", b"RIFX"):
        return "wav" if head[8:12] in (b"WAVE", b"") else "avi or another RIFF file"
    if head[:4] == b"FORM":
        return "aiff" if head[8:12] in (b"AIFF", b"AIFC", b"") else "iff"
    for offset, magic, kind in (*_READ, *_OTHERS):
        if head[offset:offset + len(magic)] == magic:
            return kind
    if may_be_frames(head):
        # the first frame is followed by another one
        return next((kind for kind, length_of in (("mp3", mp3_frame_bytes), ("aac", _aac_frame_bytes))
                     if (length := length_of(head))
                     and (len(head) <= length or length_of(head[length:length + 6]))), "")
    if 0 < len(head) < _SHORTEST_HEADER and any(magic.startswith(head) for magic in (b"RIFF", b"FORM", *(one[1] for one in _READ))):
        return "the beginning of a header"
    # no 64 bytes of 16-bit samples are letters
    is_text = len(head) >= HEAD_BYTES and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:HEAD_BYTES])
    return "text" if is_text else ""


def may_be_frames(head: bytes) -> bool:
    """Whether it begins as a frame of mp3 or aac, which 16-bit samples may do as well."""
    return len(head) > 3 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0


def mp3_frame_bytes(header: bytes) -> int:
    """Length of a frame of layer 3; 0: it is none."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return 0
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    bitrate, rate, padding = header[2] >> 4, header[2] >> 2 & 3, header[2] >> 1 & 1
    if version == 1 or layer != 1 or bitrate in (0, 15) or rate == 3:
        return 0
    is_first = version == 3
    kbps = ((32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320) if is_first else
            (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160))[bitrate - 1]
    rate_hz = (44100, 48000, 32000)[rate] // {3: 1, 2: 2, 0: 4}[version]
    return (144 if is_first else 72) * 1000 * kbps // rate_hz + padding


def _aac_frame_bytes(header: bytes) -> int:
    if len(header) < 6 or header[0] != 0xFF or header[1] & 0xF6 != 0xF0:
        return 0
    length = (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
    return length if length > 7 else 0


def require_readable(name: str, kind: str) -> None:
    """Raise DataError for a container that is not read."""
    if kind in ("wav", "aiff", *(one for _, _, one in _READ)):
        return
    what = f"is {kind}" if kind else "is not audio of a known format"
    raise DataError(f"{name} {what}, which is not supported. Supported are {READABLE}; convert it: "
                    "ffmpeg -i INPUT -ac 1 OUTPUT.wav")


def lengths(name: str, file: BinaryIO, kind: str) -> dict[int, bytes]:
    """Compare the length in the header with that of the file; DataError if it is truncated. Returns
    position and bytes of a length that replaces the placeholder of a stream.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    missing = _ogg_is_cut(file, size) if kind == "ogg" else _mp3_is_cut(file, size) if kind == "mp3" else ""
    if missing:
        raise DataError(f"{name} is truncated: {missing}; copy it again.")
    found = find_samples(file, kind)
    if found is None:
        return {}
    available = size - found.begin
    if found.length is None and found.field[1]:
        position, width = found.field
        # a field of 32 bits cannot hold the length of a longer stream, whose placeholder stays
        is_short = available < 1 << 8 * width - 1
        return {position: available.to_bytes(width, found.order)} if is_short else {}  # type: ignore[arg-type]
    if found.length is not None and available < found.length:
        raise DataError(f"{name} is truncated: {max(0, available)} of the {found.length} bytes of samples in "
                        "its header; copy it again.")
    return {}


def find_samples(file: Source, kind: str) -> Samples | None:
    """Find the samples of a container with a header; None without any, or for other containers."""
    if kind == "au":
        header = file.read(12)
        order = "little" if header[:4] == b"dns." else "big"
        begin, length = (int.from_bytes(header[at:at + 4], order) for at in (4, 8))  # type: ignore[arg-type]
        file.seek(begin)
        return Samples(begin, _known(file, length), (8, 4), order)
    if kind == "sphere":
        return _of_sphere(file)
    if kind not in ("wav", "rf64", "w64", "aiff", "caf"):
        return None
    wanted = {"aiff": b"SSND", "w64": b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0O\x8e\xdb\x8a"}.get(kind, b"data")
    field, length_64 = (0, 0), 0
    for name, length, width, order, begin in _chunks(file, kind):
        if name == b"ds64":
            # size of the file, then that of the samples
            field, length_64 = (begin + 8, 8), int.from_bytes(file.read(16)[8:], "little")
        elif name == wanted:
            if kind == "rf64" and length == 0xFFFFFFFF and field[1]:
                return Samples(begin, _known(file, length_64), field, order)
            return Samples(begin, _known(file, length), (begin - width, width) if kind != "w64" else (0, 0), order)
    return None


def wav_encoding(file: Source) -> tuple[str, int, int] | None:
    """Return (NumPy type or "<i3" for 24 bits, number of channels, sampling rate) of a wav.

    None for other encodings than integers and floating point.
    """
    fmt = next((file.read(min(length, 40)) for name, length, *_ in _chunks(file, "wav") if name == b"fmt "), b"")
    if len(fmt) < 16:
        return None
    code, channels, rate_hz, _, frame_bytes, bits = struct.unpack("<HHIIHH", fmt[:16])
    # all bits of an extensible sample must be valid
    if code == _EXTENSIBLE and len(fmt) >= 40 and fmt[26:40] == _REST_OF_CODE and fmt[18:20] == fmt[14:16]:
        code = int.from_bytes(fmt[24:26], "little")
    dtype = _PLAIN.get((code, bits))
    is_plain = dtype is not None and channels and frame_bytes == channels * bits // 8
    return (str(dtype), channels, rate_hz) if is_plain else None


def _chunks(file: Source, kind: str) -> Iterator[tuple[bytes, int, int, str, int]]:
    """Yield name, length, width and byte order of the length, and position of each chunk."""
    first = file.read({"caf": 8, "w64": 40}.get(kind, 12))
    order = "big" if kind in ("aiff", "caf") or first[:4] == b"RIFX" else "little"
    name_bytes, width, align = {"caf": (4, 8, 1), "w64": (16, 8, 8)}.get(kind, (4, 4, 2))
    for _ in range(_MAX_CHUNKS):
        header = file.read(name_bytes + width)
        if len(header) < name_bytes + width:
            return
        # lengths of w64 include the header
        length = int.from_bytes(header[name_bytes:], order, signed=kind == "caf") - (24 if kind == "w64" else 0)  # type: ignore[arg-type]
        begin = file.tell()
        yield header[:name_bytes], length, width, order, begin
        if length < 0:
            return
        file.seek(begin + length + -length % align)


def _known(file: Source, length: int) -> int | None:
    """The length, or None for a placeholder; the file is at the first sample."""
    if length < 0 or length >= 1 << 62 or any(length in placeholders for placeholders in _PLACEHOLDERS):
        return None
    if length:
        return length
    following = file.read(4)
    # nothing, or another chunk: there are no samples
    return 0 if len(following) < 4 or following in _AFTER_SAMPLES else None


def _of_sphere(file: Source) -> Samples:
    digits = file.read(16)[8:].strip()
    begin = int(digits) if digits.isdigit() else 1024
    fields = {}
    for line in file.read(max(0, min(begin, 1 << 16) - 16)).split(b"\n"):
        words = line.split()
        if words[:1] == [b"end_head"]:
            break
        if len(words) == 3 and words[2].isdigit():
            fields[words[0]] = int(words[2])
    count = fields.get(b"sample_count", 0)
    # without a count, or with 0: written to a pipe
    length = count * fields.get(b"channel_count", 1) * fields.get(b"sample_n_bytes", 2)
    return Samples(begin, length or None)


def _ogg_is_cut(file: BinaryIO, size: int) -> str:
    """What the last page lacks; empty: nothing."""
    file.seek(max(0, size - 2 * _MAX_OGG_PAGE))
    tail = file.read()
    at = tail.rfind(b"OggS")
    page = tail[at:] if at >= 0 else b""
    if len(page) < 27 or len(page) < 27 + page[26] or len(page) < 27 + page[26] + sum(page[27:27 + page[26]]):
        return "its last page is incomplete"
    return "" if page[5] & _END_OF_STREAM else "its last page is missing"


def _mp3_is_cut(file: BinaryIO, size: int) -> str:
    """Compare the bytes with those in the first frame of Xing or LAME, if there is one."""
    begin = 0
    tag = file.read(10)
    if tag[:3] == b"ID3" and len(tag) == 10:
        begin = 10 + sum((byte & 127) << 7 * (3 - at) for at, byte in enumerate(tag[6:]))
    file.seek(begin)
    frame = file.read(200)
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    # flags: 1 number of frames, 2 number of bytes
    if at < 0 or not mp3_frame_bytes(frame) or len(frame) < at + 16 or not frame[at + 7] & 2:
        # without a number of bytes, the frames are followed; something else may come after them
        file.seek(begin)
        while begin <= size and (length := mp3_frame_bytes(file.read(4))):
            begin += length
            file.seek(begin)
        return "its last frame is incomplete" if begin > size else ""
    position = at + 8 + 4 * (frame[at + 7] & 1)
    promised = int.from_bytes(frame[position:position + 4], "big")
    return f"{size - begin} of the {promised} bytes in its header" if size - begin < promised else ""


class Patched:
    """A file with other bytes at some positions, for a library that reads from it."""

    def __init__(self, file: BinaryIO, patches: dict[int, bytes]) -> None:
        self._file, self._patches = file, patches

    def read(self, size: int = -1) -> bytes:
        begin = self._file.tell()
        content = bytearray(self._file.read(size))
        for position, patch in self._patches.items():
            for at, byte in enumerate(patch, start=position - begin):
                if 0 <= at < len(content):
                    content[at] = byte
        return bytes(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
