"""Examples on disk and minibatches from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from ngsgd.config import EgsConfig
from ngsgd.egs.archives import prepare_archives, spliced_utterances
from ngsgd.egs.frames import FrameSet
from ngsgd.egs.reader import EgsReader
from ngsgd.errors import DataError
from ngsgd.schedules import Schedule
from tests.toy import NUM_CLASSES, frame_set

CONFIG = EgsConfig(left_context=2, right_context=1, frames_per_eg=4, samples_per_iter=100, num_diagnostic_frames=50)


def prepare(folder: Path, train: FrameSet | None = None, config: EgsConfig = CONFIG) -> Path:
    return prepare_archives(train or frame_set(1000, 1), frame_set(300, 2), config, num_classes=NUM_CLASSES, digest="toy",
                            cache_root=folder)


def rows(reader: EgsReader, schedule: Schedule) -> list[tuple[tuple[float, ...], int]]:
    """Every (spliced frame, class) that all shards hold, sorted."""
    found = []
    for index in range(schedule.num_archives * schedule.frames_per_eg):
        for x, pdf, _ in reader.minibatches(schedule.shard(index), 32, seed=0, outer_iter=0, job=index):
            found += [(tuple(row), int(label)) for row, label in zip(x.tolist(), pdf.tolist(), strict=True)]
    return sorted(found)


def test_all_shards_together_hold_every_spliced_frame_once(tmp_path: Path) -> None:
    train = frame_set(1000, 1)
    reader = EgsReader(prepare(tmp_path, train))
    schedule = Schedule(reader.info.num_archives, 4, 1.0, 0.1, 0.1, 1, 1)
    spliced = np.concatenate(list(spliced_utterances(train, 2, 1)))
    assert rows(reader, schedule) == sorted((tuple(row), int(pdf)) for row, pdf in
                                            zip(spliced.tolist(), train.pdf_T.tolist(), strict=True))


def test_splicing_repeats_the_edges_of_an_utterance() -> None:
    features = np.array([[1.0], [2.0], [3.0], [9.0]], np.float32)
    frames = FrameSet(features, np.zeros(4, np.int32), np.array([0, 3, 4]), ("a", "b"))
    first, second = spliced_utterances(frames, 2, 1)
    assert first.tolist() == [[1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 3]]
    assert second.tolist() == [[9, 9, 9, 9]]


def test_order_is_a_function_of_seed_outer_iteration_and_job(tmp_path: Path) -> None:
    reader = EgsReader(prepare(tmp_path))
    shard = Schedule(reader.info.num_archives, 4, 1.0, 0.1, 0.1, 1, 1).shard(0)

    def order(seed: int, outer_iter: int, job: int) -> torch.Tensor:
        return torch.cat([minibatch.x_ND for minibatch in reader.minibatches(shard, 16, seed=seed, outer_iter=outer_iter, job=job)])

    assert torch.equal(order(1, 2, 3), order(1, 2, 3))
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 2)):
        assert not torch.equal(order(1, 2, 3), order(*other))


def test_archives_are_bit_identical_when_made_again(tmp_path: Path) -> None:
    first, second = (EgsReader(prepare(tmp_path / name)).info.sha256 for name in ("a", "b"))
    assert first == second
    assert len(first) > 2


def test_minibatches_have_the_size_asked_for_and_lose_nothing(tmp_path: Path) -> None:
    reader = EgsReader(prepare(tmp_path))
    shard = Schedule(reader.info.num_archives, 4, 1.0, 0.1, 0.1, 1, 1).shard(0)
    sizes = [len(minibatch.pdf_N) for minibatch in reader.minibatches(shard, 32, seed=0, outer_iter=0, job=0)]
    assert set(sizes[:-1]) == {32}
    assert sum(sizes) == reader.num_frames(shard)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    directory = prepare(tmp_path)
    archive = directory / "egs.0000.safetensors"
    content = bytearray(archive.read_bytes())
    content[-1] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"egs\.0000\.safetensors is missing or does not match its checksum; remove"):
        list(EgsReader(directory).minibatches(Schedule(1, 4, 1, 1, 1, 1, 1).shard(0), 8, seed=0, outer_iter=0, job=0))


def test_a_folder_that_holds_no_examples_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a directory of examples"):
        EgsReader(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_feature_that_is_not_finite_is_named_by_utterance(tmp_path: Path, bad: float) -> None:
    train = frame_set(1000, 1)
    train.features_TD[130, 2] = bad
    with pytest.raises(DataError, match="utterance utt2 has a feature that is not finite"):
        prepare(tmp_path, train)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_a_class_beyond_the_last_is_refused(tmp_path: Path) -> None:
    train = frame_set(100, 1)
    train.pdf_T[3] = NUM_CLASSES
    with pytest.raises(DataError, match=f"run from 0 to {NUM_CLASSES}"):
        prepare(tmp_path, train)


def test_labels_that_do_not_fit_the_frames_are_refused() -> None:
    train = frame_set(100, 1)
    with pytest.raises(DataError, match="do not fit together"):
        dataclasses.replace(train, pdf_T=train.pdf_T[:-1])


def test_second_call_reads_what_is_there(tmp_path: Path) -> None:
    directory = prepare(tmp_path)
    before = (directory / "info.json").stat().st_mtime_ns
    assert prepare(tmp_path) == directory
    assert (directory / "info.json").stat().st_mtime_ns == before
