"""The fixed transform of the input: Kaldi's numbers, the examples' statistics, and their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.config import ModelConfig
from ngsgd.data.reader import EgsReader, Minibatch
from ngsgd.errors import DataError
from ngsgd.models.layers import FixedAffine
from ngsgd.models.statistics import class_statistics, lda_transform, model_for, statistics_for
from tests import toy
from tests.conftest import Golden
from tests.reference import models as reference

GOLDEN = Golden("blocks.npz")
LDA = ModelConfig(num_layers=1, hidden_dim=8, input_transform="lda")


def same_but_for_signs(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> bool:
    signs = np.sign((ours * theirs).sum(axis=1, keepdims=True))
    return bool(np.linalg.norm(ours * signs - theirs) <= tolerance * np.linalg.norm(theirs))


@pytest.mark.parametrize("case", GOLDEN.cases("lda"))
def test_the_transform_is_kaldis(case: str) -> None:
    total, between, mean = (GOLDEN(case, name).astype(np.float64) for name in ("total_covar", "between_covar", "mean"))
    ours = lda_transform(total, between, mean[0], within_class_factor=float(GOLDEN(case, "within_class_factor")),
                         max_singular_value=float(GOLDEN(case, "max_singular_value")), dim=max(0, int(GOLDEN(case, "dim"))))
    assert same_but_for_signs(ours, GOLDEN(case, "transform"), 1e-5)  # float32 in Kaldi


def rows(num_rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    # more classes than dimensions, or some eigenvectors would be arbitrary
    pdf_N = random.integers(0, 8, num_rows)
    means_ND = random.normal(size=(8, dim))[pdf_N]
    noise_ND = random.normal(size=(num_rows, dim)) @ random.normal(size=(dim, dim))
    return means_ND + 0.5 * noise_ND, pdf_N


def transform_of(reader: EgsReader) -> torch.Tensor:
    found = statistics_for(LDA, reader)
    assert found is not None and found.input_transform is not None
    return found.input_transform


def test_statistics_and_transform_are_the_reference() -> None:
    rows_ND, pdf_N = rows(200, 5)
    parts = [Minibatch(torch.from_numpy(rows_ND[part]), torch.from_numpy(pdf_N[part])) for part in (slice(0, 70), slice(70, 200))]
    found = class_statistics(parts, 10, np.arange(5))
    assert found.count_P.tolist() == [*np.bincount(pdf_N).tolist(), 0, 0]
    ours = lda_transform(found.total_DD, found.between_DD, found.mean_D, within_class_factor=0.01, max_singular_value=1.0)
    expected = reference.lda(rows_ND, pdf_N, within_class_factor=0.01, max_singular_value=1.0)
    assert same_but_for_signs(ours, expected, 1e-9)  # both float64


def test_columns_select_the_transformed_part() -> None:
    rows_ND, pdf_N = rows(50, 5)
    chosen = class_statistics([Minibatch(torch.from_numpy(rows_ND), torch.from_numpy(pdf_N))], 8, np.array([3, 1]))
    np.testing.assert_allclose(chosen.total_DD, np.cov(rows_ND[:, [3, 1]].T, bias=True), rtol=1e-10)


def test_a_feature_that_never_varies_is_reported() -> None:
    rows_ND, pdf_N = rows(50, 3)
    rows_ND[:, 1] = 0.0
    found = class_statistics([Minibatch(torch.from_numpy(rows_ND), torch.from_numpy(pdf_N))], 8, np.arange(3))
    with pytest.raises(DataError, match=r"model\.input_transform=none"):
        lda_transform(found.total_DD, found.between_DD, found.mean_D)


def test_statistics_are_computed_once_and_again_when_their_file_is_damaged(tmp_path: Path) -> None:
    reader = toy.Run(tmp_path).reader
    first = statistics_for(LDA, reader)
    assert first is not None and first.input_transform is not None
    assert sum(first.class_counts) == 3600 == reader.info.num_frames
    (path,) = reader.directory.glob("statistics-*")
    written = path.stat().st_mtime_ns
    assert torch.equal(transform_of(reader), first.input_transform)
    assert path.stat().st_mtime_ns == written
    content = path.read_bytes()
    for damaged in (content[:-7], content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]):
        path.write_bytes(damaged)
        assert torch.equal(transform_of(reader), first.input_transform)


def test_the_transform_is_of_the_training_examples_and_leaves_them_decorrelated(tmp_path: Path) -> None:
    run = toy.Run(tmp_path)
    y_ND = FixedAffine(transform_of(run.reader))(run.reader.diagnostic("train").x_ND).double()
    centred = y_ND - y_ND.mean(dim=0)
    correlation = torch.corrcoef(centred.T) - torch.eye(y_ND.shape[1])
    # 200 rows: 5 standard deviations of a correlation of 0
    assert float(correlation.abs().max()) < 0.35
    assert float(y_ND.mean(dim=0).abs().max()) < 0.5


@pytest.mark.parametrize("kind", ["relu", "tdnn"])
def test_training_leaves_the_transform_alone_and_learns_behind_it(tmp_path: Path, kind: Any) -> None:
    model = ModelConfig(kind=kind, num_layers=2, hidden_dim=16, input_transform="lda", tdnn_offsets="-1,0 -1,0,1")
    run = toy.Run(tmp_path, toy.config(model=model))
    before = {name: value.clone() for name, value in run.model.named_buffers() if "transform" in name}
    assert before and not any("transform" in name for name in run.store.layout.names)
    run.train()
    assert run.recorder.records[-1].valid.accuracy > 0.8  # six classes; chance is 0.17
    fresh = dict(model_for(run.config, run.reader).named_buffers())
    assert all(torch.equal(value, run.model.get_buffer(name)) and torch.equal(value, fresh[name]) for name, value in before.items())


def test_a_row_of_weight_two_counts_as_met_twice() -> None:
    generator = torch.Generator().manual_seed(5)
    x_ND, pdf_N = torch.randn(40, 3, generator=generator), torch.arange(40) % 4
    weight_N = 1.0 + (torch.arange(40) % 2)
    repeated = torch.repeat_interleave(torch.arange(40), weight_N.long())
    found, expected = (class_statistics([minibatch], 4, np.arange(3)) for minibatch in (
        Minibatch(x_ND, pdf_N, weight_N), Minibatch(x_ND[repeated], pdf_N[repeated])))
    for name in ("count_P", "total_DD", "between_DD", "mean_D"):
        # float64 sums
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-14)
