"""Archives of features and alignments, to and from two other implementations of Kaldi's formats:
kaldiio and kaldi-native-io.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kaldi_native_io
import kaldiio
import numpy as np
import pytest

from ngsgd.asr.features import cmvn
from ngsgd.asr.kaldi_io.tables import (
    Entry,
    read_ark,
    read_int_vectors,
    read_matrix,
    read_stats,
    write_int_vectors,
    write_matrices,
    write_matrix,
)

RANDOM = np.random.default_rng(0)
FEATURES = {f"utt{number}": RANDOM.normal(size=(5 + number, 3)).astype(np.float32) for number in range(3)}
ALIGNMENT = {key: RANDOM.integers(1000, size=len(rows)).astype(np.int32) for key, rows in FEATURES.items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return list(found) == list(expected) and all(np.array_equal(found[key], expected[key]) for key in expected)


def test_written_files_are_readable_by_the_other_library(tmp_path: Path) -> None:
    write_matrices(tmp_path / "feats.ark", FEATURES.items())
    write_int_vectors(tmp_path / "ali.ark", ALIGNMENT.items())
    assert same(dict(kaldiio.load_ark(str(tmp_path / "feats.ark"))), FEATURES)
    assert same({key: kaldiio.load_scp(str(tmp_path / "feats.scp"))[key] for key in FEATURES}, FEATURES)
    assert same(dict(kaldiio.load_ark(str(tmp_path / "ali.ark"))), ALIGNMENT)
    with kaldi_native_io.SequentialFloatMatrixReader(f"scp:{tmp_path / 'feats.scp'}") as reader:
        assert same({key: np.array(matrix) for key, matrix in reader}, FEATURES)
    with kaldi_native_io.SequentialInt32VectorReader(f"ark:{tmp_path / 'ali.ark'}") as reader:
        assert same({key: np.array(vector) for key, vector in reader}, ALIGNMENT)


def test_files_of_kaldiio_are_read(tmp_path: Path) -> None:
    kaldiio.save_ark(str(tmp_path / "feats.ark"), FEATURES, scp=str(tmp_path / "feats.scp"))
    kaldiio.save_ark(str(tmp_path / "ali.ark"), ALIGNMENT)
    assert same(read_ark(tmp_path / "feats.ark"), FEATURES)
    assert same(read_int_vectors(tmp_path / "ali.ark"), ALIGNMENT)
    for line in (tmp_path / "feats.scp").read_text().splitlines():
        key, place = line.split()
        assert np.array_equal(read_matrix(Entry(place, "feats.scp:1"), tmp_path), FEATURES[key])


STATS = {f"spk{number}": cmvn.statistics(FEATURES[f"utt{number}"]) for number in range(3)}


def test_cmvn_that_is_written_here_is_read_and_applied_there(tmp_path: Path) -> None:
    write_matrices(tmp_path / "cmvn.ark", STATS.items())
    write_matrix(tmp_path / "global_cmvn.stats", STATS["spk0"])
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
        found = read_stats(Entry(place, "cmvn.scp:1"), tmp_path, 3)
        np.testing.assert_allclose(found, STATS[key], rtol=1e-5 if form == "ark,t" else 1e-7 * (dtype == np.float32))


def test_cmvn_of_kaldiio_is_read_here(tmp_path: Path) -> None:
    kaldiio.save_ark(str(tmp_path / "cmvn.ark"), STATS, scp=str(tmp_path / "cmvn.scp"))
    for line in (tmp_path / "cmvn.scp").read_text().splitlines():
        key, place = line.split()
        assert np.array_equal(read_stats(Entry(place, "cmvn.scp:1"), tmp_path, 3), STATS[key])
