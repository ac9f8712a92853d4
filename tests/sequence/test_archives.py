"""Archives of sequences: every frame once, spliced as for decoding, in an order that seed, outer
iteration and job decide.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from ngsgd.data.archives import prepare_archives, spliced_utterances
from ngsgd.data.frames import FrameSet, Side
from ngsgd.data.reader import EgsReader
from ngsgd.errors import DamagedArchiveError, DataError
from ngsgd.schedules import Shard
from ngsgd.sequence.archives import SequenceMinibatch, SequenceReader, prepare_sequences
from ngsgd.sequence.ngram import state_ngram
from tests import toy

TRAIN = toy.frame_set(1000, 1)


def reader(folder: Path, train: FrameSet = TRAIN, chunk_frames: int = 0) -> SequenceReader:
    frames = EgsReader(prepare_archives(train, toy.frame_set(200, 2), toy.config().egs, num_classes=toy.NUM_CLASSES, digest="toy",
                                        cache_root=folder))
    labels = [TRAIN.pdf_T[begin:end] for begin, end in zip(TRAIN.offsets[:-1], TRAIN.offsets[1:], strict=True)]
    graph = state_ngram(labels, order=3)
    graph = graph.anywhere() if chunk_frames else graph
    directory = prepare_sequences(train, graph, samples_per_iter=300, chunk_frames=chunk_frames, cache_root=folder,
                                  digest=sha256(train.pdf_T.tobytes()).hexdigest())
    return SequenceReader(directory, frames)


def all_of(found: SequenceReader, *, seed: int = 0, size: int = 120) -> list[SequenceMinibatch]:
    return [minibatch for archive in range(found.info.num_archives)
            for minibatch in found.minibatches(Shard(archive, 0), size, seed=seed, outer_iter=0, job=0)]


BESIDE = replace(TRAIN, side=Side(np.random.default_rng(3).normal(size=(150, 2)).astype(np.float32),
                                  np.random.default_rng(4).integers(150, size=1000).astype(np.int32)))


@pytest.mark.parametrize("train", [TRAIN, BESIDE])
@pytest.mark.parametrize("chunk_frames", [0, 20])
def test_every_frame_is_met_once_with_its_context_and_label(tmp_path: Path, chunk_frames: int, train: FrameSet) -> None:
    found = reader(tmp_path, train, chunk_frames=chunk_frames)
    minibatches = all_of(found)
    expected = torch.from_numpy(np.concatenate(list(spliced_utterances(train, 2, 1))))
    labels = torch.from_numpy(TRAIN.pdf_T).long()
    place = {row.numpy().tobytes(): at for at, row in enumerate(expected)}
    order = [place[row.numpy().tobytes()] for minibatch in minibatches for row in minibatch.x_ND]
    assert sorted(order) == list(range(1000))
    assert torch.equal(torch.cat([minibatch.pdf_N for minibatch in minibatches]), labels[order])
    begin = 0
    for length in (length for minibatch in minibatches for length in minibatch.lengths):
        assert order[begin:begin + length] == list(range(order[begin], order[begin] + length))
        assert chunk_frames == 0 or 15 <= length <= 25
        begin += length


def test_the_order_is_decided_by_the_seed_and_a_pass_can_be_taken_up_in_the_middle(tmp_path: Path) -> None:
    found = reader(tmp_path)
    first, again, other = (torch.cat([one.x_ND for one in all_of(found, seed=seed)]) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    whole = list(found.minibatches(Shard(0, 0), 120, seed=0, outer_iter=0, job=0))
    assert len(whole) == found.num_minibatches(Shard(0, 0), 120) > 1
    [second] = found.minibatches(Shard(0, 0), 120, seed=0, outer_iter=0, job=0, first=1, stop=2)
    assert torch.equal(second.x_ND, whole[1].x_ND) and second.lengths == whole[1].lengths
    assert sum(map(len, (one.pdf_N for one in whole))) == found.num_frames(Shard(0, 0))


def test_sequences_that_are_not_in_the_graph_are_skipped_and_counted(tmp_path: Path) -> None:
    pdf_T = TRAIN.pdf_T.copy()
    pdf_T[57:114] = np.arange(57) % 2 * 5  # 0 5 0 5: in no other utterance
    found = reader(tmp_path, replace(TRAIN, pdf_T=pdf_T))
    assert found.index.num_left_out == 1
    assert sum(found.index.num_frames) == 1000 - 57
    with pytest.raises(DataError, match="no path"):
        reader(tmp_path, replace(TRAIN, pdf_T=(np.arange(1000) % 2 * 5).astype(np.int32)))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    found = reader(tmp_path)
    path = next(found.directory.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DamagedArchiveError, match=path.name):
        all_of(found)
