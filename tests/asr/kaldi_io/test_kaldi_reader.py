"""Our reader of Kaldi's objects against two others: every form, bits, ranges, damaged headers."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kaldi_native_io
import kaldiio
import numpy as np
import pytest

from ngsgd.asr import unpacking
from ngsgd.asr.features import cmvn
from ngsgd.asr.kaldi_io import tables
from ngsgd.asr.kaldi_io.tables import Entry, read_ark, read_int_vectors, read_matrix, write_matrices
from ngsgd.data.kaldi_objects import KaldiFormatError, Place, open_source, parse_place, read_archive
from ngsgd.errors import DataError

Arrays = dict[str, np.ndarray[Any, Any]]


def matrices(dtype: str = "f4") -> Arrays:
    random = np.random.default_rng(0)
    return {f"utt{rows}": (random.normal(size=(rows, columns)) * 10).astype(dtype)
            for rows, columns in ((1, 1), (2, 7), (31, 40), (300, 13))}


def read_all(path: Path) -> Arrays:
    with open_source(path) as source:
        return dict(read_archive(source))


def same_bits(found: Arrays, expected: Arrays) -> bool:
    return list(found) == list(expected) and all(
        found[key].dtype == expected[key].dtype and found[key].shape == expected[key].shape
        and found[key].tobytes() == expected[key].tobytes() for key in expected)


@pytest.mark.parametrize(("kind", "form"), [
    *((kind, "ark") for kind in ("FloatMatrix", "DoubleMatrix", "FloatVector", "DoubleVector")),
    ("FloatMatrix", "ark,t"), ("FloatVector", "ark,t")])
def test_objects_of_kaldi_native_io_are_read_bitwise(tmp_path: Path, kind: str, form: str) -> None:
    arrays = matrices("f4" if "Float" in kind else "f8")
    arrays = arrays if "Matrix" in kind else {key: array[0] for key, array in arrays.items()}
    path = tmp_path / "a.ark"
    with getattr(kaldi_native_io, f"{kind}Writer")(f"{form}:{path}") as writer:
        for key, array in arrays.items():
            writer.write(key, array)
    if form == "ark,t":
        # text has fewer digits
        with getattr(kaldi_native_io, f"Sequential{kind}Reader")(f"ark:{path}") as reader:
            arrays = {key: np.array(array) for key, array in reader}
    assert same_bits(read_all(path), arrays)


METHODS = ["kAutomaticMethod", "kSpeechFeature", "kTwoByteAuto", "kTwoByteSignedInteger", "kOneByteAuto",
           "kOneByteUnsignedInteger", "kOneByteZeroOne"]


@pytest.mark.parametrize("method", METHODS)
def test_compressed_matrices_have_the_bits_of_kaldi_native_io(tmp_path: Path, method: str) -> None:
    with kaldi_native_io.CompressedMatrixWriter(f"ark:{tmp_path / 'a.ark'}") as writer:
        for key, array in matrices().items():
            writer.write(key, array, getattr(kaldi_native_io.CompressionMethod, method))
    with kaldi_native_io.SequentialFloatMatrixReader(f"ark:{tmp_path / 'a.ark'}") as reader:
        expected = {key: np.array(array) for key, array in reader}
    assert same_bits(dict(read_ark(tmp_path / "a.ark")), expected)


@pytest.mark.parametrize("method", [1, 2, 3, 5])
def test_compressed_matrices_of_kaldiio_are_read(tmp_path: Path, method: int) -> None:
    kaldiio.save_ark(str(tmp_path / "a.ark"), matrices(), compression_method=method)
    found = read_ark(tmp_path / "a.ark")
    for key, theirs in kaldiio.load_ark(str(tmp_path / "a.ark")):
        # kaldiio sums in another order, on values of up to about 40
        np.testing.assert_allclose(found[key], theirs, rtol=0.0, atol=1e-5)


def test_text_of_kaldiio_is_read(tmp_path: Path) -> None:
    kaldiio.save_ark(str(tmp_path / "a.ark"), matrices(), text=True)
    for key, matrix in read_ark(tmp_path / "a.ark").items():
        np.testing.assert_allclose(matrix, matrices()[key], rtol=1e-6)


@pytest.mark.parametrize("form", ["ark", "ark,t"])
@pytest.mark.parametrize("packed", [False, True])
def test_integer_vectors_are_exchanged_both_ways(tmp_path: Path, form: str, packed: bool) -> None:
    random = np.random.default_rng(0)
    numbers = {f"u{size}": random.integers(-2**31, 2**31, size).astype(np.int32) for size in (0, 1, 1000)}
    with kaldi_native_io.Int32VectorWriter(f"{form}:{tmp_path / 'a.ark'}") as writer:
        for key, array in numbers.items():
            writer.write(key, array.tolist())
    (tmp_path / "ali.1.gz").write_bytes(gzip.compress((tmp_path / "a.ark").read_bytes()))
    assert same_bits(dict(read_int_vectors(tmp_path / ("ali.1.gz" if packed else "a.ark"))), numbers)
    tables.write_int_vectors(tmp_path / "b.ark", numbers.items())
    with kaldi_native_io.SequentialInt32VectorReader(f"ark:{tmp_path / 'b.ark'}") as reader:
        assert {key: list(array) for key, array in reader} == {key: array.tolist() for key, array in numbers.items()}


RANGES = ["[0:19]", "[5:5]", "[0:19,3:5]", "[:,0:3]", "[:,2:2]", "[28:30]", "[28:31]", "[28:33]", "[0:4,:]"]


def written_place(folder: Path) -> str:
    """Where the matrix of 31 rows is, among the others."""
    write_matrices(folder / "a.ark", matrices().items())
    return next(line.split()[1] for line in (folder / "a.scp").read_text().splitlines()
                if line.startswith("utt31 "))


@pytest.mark.entry("K10", "feats.scp has row ranges, as `feats.ark:12[0:19]`", "works",
                   "rows and columns are cut as Kaldi cuts them; ranges outside of the matrix are a `DataError`.")
@pytest.mark.parametrize("part", RANGES)
def test_ranges_are_those_of_kaldi(tmp_path: Path, part: str) -> None:
    """Both ends belong to the range, and the last row may lie up to three rows beyond the end."""
    place = written_place(tmp_path)
    (tmp_path / "b.scp").write_text(f"utt31 {place}{part}\n")
    with kaldi_native_io.SequentialFloatMatrixReader(f"scp:{tmp_path / 'b.scp'}") as reader:
        [(_, expected)] = [(key, np.array(array)) for key, array in reader]
    found = read_matrix(Entry(place + part, "b.scp:1"), tmp_path)
    assert found.shape == expected.shape and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("part", ["[0:34]", "[31:31]", "[3:2]", "[0:1,0:40]", "[0:1,0:1,0:1]",
                                  "[a]", "[-1:3]", "[]", "[,2:2]", "[0:4,]", "[0:99999999999]"])
def test_ranges_beyond_the_matrix_are_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(DataError, match=r"b\.scp:7"):
        read_matrix(Entry(written_place(tmp_path) + part, "b.scp:7"), tmp_path)


def test_places_are_parsed() -> None:
    assert parse_place("a b.ark:12[0:19,3:5]") == Place("a b.ark", 12, (0, 19), (3, 5))
    assert parse_place("C:a.ark") == Place("C:a.ark", 0)
    assert parse_place("a.ark:007") == Place("a.ark", 7)
    for value in ("cat a.ark |", "cat a.ark |[0:3]", "| cat", "a.ark; touch b |", "-", "", "[0:3]", ":12", "a\0b"):
        with pytest.raises(KaldiFormatError):
            parse_place(value)


def number(value: int) -> bytes:
    return b"\4" + struct.pack("<i", value)


def hostile() -> Iterator[tuple[str, bytes]]:
    for rows, columns in ((-1, 2), (2, -1), (-2, -2), (2**31 - 1, 2**31 - 1), (2**31 - 1, 0), (0, 5), (3, 3)):
        for kind in (b"FM ", b"DM "):
            yield f"{kind!r} {rows} {columns}", b"\0B" + kind + number(rows) + number(columns) + b"\0" * 32
        for kind in (b"CM ", b"CM2 ", b"CM3 "):
            header = struct.pack("<ffii", 0.0, 1.0, 10 * rows if rows == 3 else rows, columns)
            yield f"{kind!r} {rows} {columns}", b"\0B" + kind + header + b"\0" * 8
    yield "CM of NaN", b"\0BCM2 " + struct.pack("<ffii", float("nan"), 1.0, 1, 1) + b"\0\0"
    for length in (-1, 2**31 - 1, 5):
        yield f"FV {length}", b"\0BFV " + number(length) + b"\0" * 8
        yield f"ints {length}", b"\0B" + number(length) + number(1)
    yield "long integers", b"\0B" + number(1) + b"\x08" + struct.pack("<i", 1)
    yield "size byte", b"\0BFM \x08" + struct.pack("<i", 1) + number(1) + b"\0" * 4
    for content in (b"", b"\0", b"\0B", b"\0BF", b"\0BXX ", b"\0BSM ", b"\0B<Nnet3Eg> ", b"[", b"[ 1 2",
                    b"[ 1 x ]\n", b"[\n 1 2\n 3 ]\n", b"[ 1_0 ]\n", b"[ 1 ] 2\n", b"nan\n",
                    b"99999999999\n", b"\xff\xfe\n", b"\x80\x04K\x01."):
        yield repr(content), content


HOSTILE = dict(hostile())


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_headers_are_refused_before_memory_is_allocated(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.ark").write_bytes(b"key " + HOSTILE[name])
    with pytest.raises(DataError, match=r"feats\.scp:3"):
        read_matrix(Entry(f"{tmp_path / 'a.ark'}:4", "feats.scp:3"), tmp_path)
    with pytest.raises(DataError, match=r"a\.ark"):
        read_ark(tmp_path / "a.ark")
    if "ints" in name or "long" in name:
        with pytest.raises(DataError, match=r"a\.ark"):
            read_int_vectors(tmp_path / "a.ark")


@pytest.mark.parametrize(("content", "kind"), [
    (b"PKL\x80\x04K\x01.", "pickle"), (b"NPY\x04abcd", "NumPy"), (b"AUDIO\x04abcd", "audio"), (b"RIFF\0\0\0\0WAVE", "wav"),
    (b"fLaC\0", "flac"), (b"\x93NUMPY\1\0", "NumPy"), (b"PK\3\4", "zip"),
])
def test_foreign_content_is_refused_by_name(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "a.ark").write_bytes(b"key " + content)
    with pytest.raises(DataError, match=kind):
        read_matrix(Entry(f"{tmp_path / 'a.ark'}:4", "feats.scp:3"), tmp_path)
    for read in (read_ark, read_int_vectors):
        with pytest.raises(DataError, match=f"a\\.ark.*{kind}"):
            read(tmp_path / "a.ark")


def test_offset_beyond_the_file_and_missing_file_name_the_line(tmp_path: Path) -> None:
    write_matrices(tmp_path / "a.ark", matrices().items())
    for value in ("a.ark:999999", f"a.ark:{10**18 - 1}", "b.ark:5"):
        with pytest.raises(DataError, match=r"feats\.scp:3"):
            read_matrix(Entry(value, "feats.scp:3"), tmp_path)


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    tables.write_int_vectors(tmp_path / "a.ark", [("a", np.arange(3, dtype=np.int32))] * 2)
    with pytest.raises(DataError, match="twice"):
        read_int_vectors(tmp_path / "a.ark")


def test_fifos_are_refused_without_blocking(tmp_path: Path) -> None:
    for name in ("a.ark", "ali.1.gz"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="regular"):
        read_matrix(Entry("a.ark:4", "feats.scp:3"), tmp_path)
    with pytest.raises(DataError, match="regular"):
        read_int_vectors(tmp_path / "ali.1.gz")


def test_gzip_that_expands_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "ALWAYS_BYTES", 1 << 16)
    (tmp_path / "ali.1.gz").write_bytes(gzip.compress(b"\0" * (1 << 24)))
    with pytest.raises(DataError, match="expands"):
        read_int_vectors(tmp_path / "ali.1.gz")


RANDOM = np.random.default_rng(0)
FEATURES = {f"utt{number}": RANDOM.normal(size=(5 + number, 3)).astype(np.float32)
            for number in range(3)}
ALIGNMENT = {key: RANDOM.integers(1000, size=len(rows)).astype(np.int32)
             for key, rows in FEATURES.items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return list(found) == list(expected) and all(np.array_equal(found[key], expected[key])
                                                 for key in expected)


def test_written_files_are_readable_by_the_other_library(tmp_path: Path) -> None:
    write_matrices(tmp_path / "feats.ark", FEATURES.items())
    tables.write_int_vectors(tmp_path / "ali.ark", ALIGNMENT.items())
    assert same(dict(kaldiio.load_ark(str(tmp_path / "feats.ark"))), FEATURES)
    assert same({key: kaldiio.load_scp(str(tmp_path / "feats.scp"))[key] for key in FEATURES},
                FEATURES)
    assert same(dict(kaldiio.load_ark(str(tmp_path / "ali.ark"))), ALIGNMENT)
    with kaldi_native_io.SequentialFloatMatrixReader(f"scp:{tmp_path / 'feats.scp'}") as reader:
        assert same({key: np.array(matrix) for key, matrix in reader}, FEATURES)
    with kaldi_native_io.SequentialInt32VectorReader(f"ark:{tmp_path / 'ali.ark'}") as reader:
        assert same({key: np.array(vector) for key, vector in reader}, ALIGNMENT)


STATS = {f"spk{number}": cmvn.statistics(FEATURES[f"utt{number}"]) for number in range(3)}


def test_cmvn_that_is_written_here_is_read_and_applied_there(tmp_path: Path) -> None:
    write_matrices(tmp_path / "cmvn.ark", STATS.items())
    tables.write_matrix(tmp_path / "global_cmvn.stats", STATS["spk0"])
    assert same({key: kaldiio.load_scp(str(tmp_path / "cmvn.scp"))[key] for key in STATS}, STATS)
    assert np.array_equal(kaldiio.load_mat(str(tmp_path / "global_cmvn.stats")), STATS["spk0"])
    with kaldi_native_io.SequentialDoubleMatrixReader(f"scp:{tmp_path / 'cmvn.scp'}") as reader:
        assert same({key: np.array(matrix) for key, matrix in reader}, STATS)


@pytest.mark.parametrize("form", ["ark", "ark,t"])
@pytest.mark.parametrize("precision", ["Double", "Float"])
def test_cmvn_of_kaldi_native_io_is_read_here(tmp_path: Path, form: str, precision: str) -> None:
    write = getattr(kaldi_native_io, f"{precision}MatrixWriter")
    dtype = np.float64 if precision == "Double" else np.float32
    with write(f"{form},scp:{tmp_path / 'cmvn.ark'},{tmp_path / 'cmvn.scp'}") as writer:
        for key, matrix in STATS.items():
            writer.write(key, matrix.astype(dtype))
    for line in (tmp_path / "cmvn.scp").read_text().splitlines():
        key, place = line.split()
        found = tables.read_stats(Entry(place, "cmvn.scp:1"), tmp_path, 3)
        np.testing.assert_allclose(found, STATS[key], rtol=1e-5 if form == "ark,t"
                                   else 1e-7 * (dtype == np.float32))
