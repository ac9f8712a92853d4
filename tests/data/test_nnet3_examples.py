"""nnet3's examples: the same back, the bytes that Kaldi writes, and compressed matrices."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngsgd.data.nnet3_examples import Nnet3Example, read_nnet3_examples, write_nnet3_examples
from ngsgd.errors import DataError


def example(key: str, num_frames: int = 3, left_context: int = 2) -> Nnet3Example:
    random = np.random.default_rng(len(key))
    return Nnet3Example(key, random.normal(size=(left_context + num_frames + 1, 4)).astype(np.float32), left_context,
                        random.integers(5, size=num_frames).astype(np.int32), random.random(num_frames).astype(np.float32), 5)


def test_examples_come_back_with_identical_bits(tmp_path: Path) -> None:
    # times beyond what fits into one byte
    written = [example("a"), example("bb", num_frames=300, left_context=200),
               replace(example("c"), ivector_S=np.arange(7, dtype=np.float32))]
    assert write_nnet3_examples(tmp_path / "egs.ark", written) == 3
    found = list(read_nnet3_examples(tmp_path / "egs.ark"))
    for before, after in zip(written, found, strict=True):
        assert (before.key, before.left_context, before.num_classes) == (after.key, after.left_context, after.num_classes)
        for name in ("features_WD", "pdf_F", "weight_F", "ivector_S"):
            assert np.array_equal(getattr(before, name), getattr(after, name)), name


def test_the_bytes_are_those_of_kaldis_format(tmp_path: Path) -> None:
    """Put together by hand from the description of the format."""
    one = Nnet3Example("k", np.array([[1.5], [2.5]], np.float32), 1, np.array([3], np.int32), np.array([0.5], np.float32), 4)
    write_nnet3_examples(tmp_path / "egs.ark", [one])
    four = b"\x04"

    def number(value: int) -> bytes:
        return four + struct.pack("<i", value)
    expected = (b"k \0B<Nnet3Eg> <NumIo> " + number(2)
                + b"<NnetIo> input <I1V> " + number(2) + b"\xff\x01" + b"FM " + number(2) + number(1) + struct.pack("<ff", 1.5, 2.5)
                + b"</NnetIo> <NnetIo> output <I1V> " + number(1) + b"\x00" + b"SM " + number(1) + b"SV " + number(4) + number(1)
                + number(3) + four + struct.pack("<f", 0.5) + b"</NnetIo> </Nnet3Eg> ")
    assert (tmp_path / "egs.ark").read_bytes() == expected


@pytest.mark.parametrize(("kind", "method", "error"), [("CM2", 3, 1e-4), ("CM3", 5, 2e-2), ("CM", 2, 5e-2)])
def test_compressed_features_are_read_as_kaldiio_reads_them(tmp_path: Path, kind: str, method: int, error: float) -> None:
    """`error` is the rounding of 16 and of 8 bits over 6 deviations."""
    kaldiio = pytest.importorskip("kaldiio", reason="the extra asr")
    one = example("k", num_frames=40)
    kaldiio.save_ark(str(tmp_path / "feats.ark"), {"k": one.features_WD}, compression_method=method)
    matrix = (tmp_path / "feats.ark").read_bytes().removeprefix(b"k \0B")
    assert matrix.startswith(kind.encode() + b" ")
    write_nnet3_examples(tmp_path / "egs.ark", [one])
    plain = b"FM \x04" + struct.pack("<i", 43) + b"\x04" + struct.pack("<i", 4) + one.features_WD.tobytes()
    content = (tmp_path / "egs.ark").read_bytes()
    assert plain in content
    (tmp_path / "egs.ark").write_bytes(content.replace(plain, matrix))
    [found] = read_nnet3_examples(tmp_path / "egs.ark")
    [(_, theirs)] = kaldiio.load_ark(str(tmp_path / "feats.ark"))
    # float32, in another order
    np.testing.assert_allclose(found.features_WD, theirs, rtol=0.0, atol=1e-5)
    np.testing.assert_allclose(found.features_WD, one.features_WD, rtol=0.0, atol=error)


def test_a_file_that_is_cut_off_is_reported(tmp_path: Path) -> None:
    write_nnet3_examples(tmp_path / "egs.ark", [example("a")])
    (tmp_path / "egs.ark").write_bytes((tmp_path / "egs.ark").read_bytes()[:-20])
    with pytest.raises(DataError, match="nnet3 examples"):
        list(read_nnet3_examples(tmp_path / "egs.ark"))
