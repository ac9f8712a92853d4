"""Compressed files from others: what expands too much, links, loops and damage are typed errors."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr import unpacking
from ngsgd.asr.corpora import alignments, fsdd, manifests
from ngsgd.errors import DataError

ZEROS = 1 << 22


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "ALWAYS_BYTES", 1 << 18)
    monkeypatch.setattr(unpacking, "MAX_MEMBER_BYTES", 1 << 18)


def zip_of(path: Path, *sizes: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, size in enumerate(sizes):
            archive.writestr(f"{number}.wav", b"\0" * size)


def zip_bomb_with_a_false_size(path: Path) -> None:
    zip_of(path, ZEROS)
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", ZEROS), struct.pack("<I", 100)))


def tar_of(path: Path, *members: tarfile.TarInfo, mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member in members:
            archive.addfile(member, io.BytesIO(b"\0" * member.size))


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, target
    return made


def tar_with_a_long_header(path: Path) -> None:
    """The name of the next member has gigabytes; Python's tarfile reads it into memory."""
    header = member("././@LongLink", 0, tarfile.GNUTYPE_LONGNAME)
    header.size = 6 << 30
    path.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + b"x" * 4096))


def cut_tar(path: Path) -> None:
    tar_of(path, member("a.wav", 100_000))
    path.write_bytes(path.read_bytes()[:-60])


@pytest.mark.parametrize("make", [
    lambda path: zip_of(path, ZEROS), lambda path: zip_of(path, *[1 << 17] * 40),
    zip_bomb_with_a_false_size, lambda path: tar_of(path, member("a.wav", ZEROS)),
    lambda path: tar_of(path, member("a.txt", ZEROS * 8), member("b.wav", 10)),
    tar_with_a_long_header, cut_tar, Path.touch, os.mkfifo])
def test_bombs_and_damage_are_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "recordings")
    with pytest.raises(DataError, match="recordings"):
        list(fsdd.wav_files(tmp_path / "recordings"))


def test_links_in_a_tar_are_skipped(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", member("good.wav", 100), member("dangling.wav", 0, tarfile.LNKTYPE, "nowhere"),
           member("passwd.wav", 0, tarfile.SYMTYPE, "/etc/passwd"), member("loop.wav", 0, tarfile.SYMTYPE, "loop.wav"),
           member("one.wav", 0, tarfile.LNKTYPE, "two.wav"), member("two.wav", 0, tarfile.LNKTYPE, "one.wav"),
           member("tty.wav", 0, tarfile.CHRTYPE), member("pipe.wav", 0, tarfile.FIFOTYPE), mode="w")
    assert list(fsdd.wav_files(tmp_path / "a.tar")) == [("good.wav", b"\0" * 100)]


def test_a_fifo_among_recordings_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.wav")
    with pytest.raises(DataError, match=r"a\.wav"):
        list(fsdd.wav_files(tmp_path))


@pytest.mark.parametrize("line", [
    " " * ZEROS, "[" * 100_000, json.dumps({"id": "a", "sources": [{"type": "file", "source": "a\0b"}]}),
    json.dumps({"id": "a", "sources": {}}), json.dumps({"id": []})])
def test_manifests_that_expand_or_nest_are_named(tmp_path: Path, line: str) -> None:
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        for kind in ("recordings", "supervisions"):
            (tmp_path / name / f"{kind}.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    with pytest.raises(DataError, match=r"recordings\.jsonl\.gz"):
        manifests.read_sets(tmp_path)


save: Any = np.savez_compressed   # its annotations take no dictionary of arrays
GOOD = {"pdf": np.arange(6, dtype=np.int32), "offsets": np.array([0, 2, 6]), "utt_ids": np.array(["a", "b"])}


@pytest.mark.parametrize("change", [
    {"pdf": np.zeros(ZEROS, np.int32), "offsets": np.array([0, 2, ZEROS])}, {"pdf": np.arange(6.0)},
    {"pdf": np.array([1, 2, 3, 4, 5, 2**40])}, {"offsets": np.array([0, 7, 6])}, {"offsets": np.array([2, 0, 6])},
    {"offsets": np.array([0, 2, 5])}, {"offsets": np.array([0.0, 2.0, 6.0])}, {"offsets": np.array([0, 6])},
    {"utt_ids": np.array([1, 2])}, {"utt_ids": np.array(["a", {"b": 1}], dtype=object)}])
def test_alignments_whose_arrays_do_not_fit_are_refused(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    save(tmp_path / "ali.npz", **{**GOOD, **change})
    with pytest.raises(DataError, match=r"ali\.npz"):
        alignments.read(tmp_path / "ali.npz")
    save(tmp_path / "ali.npz", **GOOD)
    assert alignments.read(tmp_path / "ali.npz").pdf_T["b"].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(2**60,), (-5,), (2**62, 2**62)])
def test_an_alignment_that_promises_a_giant_array_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "ali.npz", "w") as archive:
        archive.writestr("pdf.npy", header.getvalue() + b"\0" * 100)
    with pytest.raises(DataError, match=r"ali\.npz"):
        alignments.read(tmp_path / "ali.npz")
