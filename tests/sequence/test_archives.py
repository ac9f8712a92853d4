"""Archives of sequences: every frame once, spliced; order by seed, outer iteration and job."""

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
from ngsgd.sequence.archives import Outputs, SequenceMinibatch, SequenceReader, prepare_sequences
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.ngram import state_ngram
from ngsgd.sequence.objectives import Chains, chain_of
from tests import toy

TRAIN = toy.frame_set(1000, 1)


def denominator(step: int) -> StateGraph:
    labels = [TRAIN.pdf_T[begin:end] for begin, end in zip(TRAIN.offsets[:-1], TRAIN.offsets[1:], strict=True)]
    return state_ngram([pdf_T[first::step] for pdf_T in labels for first in range(step)], order=3)


def reader(folder: Path, train: FrameSet = TRAIN, chunk_frames: int = 0, outputs: Outputs | None = None) -> SequenceReader:
    egs = prepare_archives(train, toy.frame_set(200, 2), toy.config().egs,
                           num_classes=toy.NUM_CLASSES, digest="toy", cache_root=folder)
    graph = denominator((outputs or Outputs()).frame_subsampling)
    graph = graph.anywhere() if chunk_frames else graph
    directory = prepare_sequences(train, graph, samples_per_iter=300, chunk_frames=chunk_frames, cache_root=folder,
                                  digest=sha256(train.pdf_T.tobytes()).hexdigest(), outputs=outputs)
    return SequenceReader(directory, EgsReader(egs))


def all_of(found: SequenceReader, *, seed: int = 0, size: int = 120) -> list[SequenceMinibatch]:
    return [minibatch for archive in range(found.info.num_archives)
            for minibatch in found.minibatches(Shard(archive, 0), size, seed=seed, outer_iter=0, job=0)]


BESIDE = replace(TRAIN, side=Side(np.random.default_rng(3).normal(size=(150, 2)).astype(np.float32),
                                  np.random.default_rng(4).integers(150, size=1000).astype(np.int32)))


EXPECTED = torch.from_numpy(np.concatenate(list(spliced_utterances(TRAIN, 2, 1))))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("train", [TRAIN, BESIDE])
@pytest.mark.parametrize("chunk_frames", [0, 20])
def test_every_frame_is_met_once_with_its_context_and_label(tmp_path: Path, chunk_frames: int, train: FrameSet) -> None:
    minibatches = all_of(reader(tmp_path, train, chunk_frames=chunk_frames))
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


@pytest.mark.parametrize("chunk_frames", [0, 20])
def test_a_pass_has_the_outputs_of_every_frame_in_sequences_of_every_third(tmp_path: Path, chunk_frames: int) -> None:
    found = reader(tmp_path, chunk_frames=chunk_frames, outputs=Outputs(3, 4))
    place = {row.numpy().tobytes(): at for at, row in enumerate(EXPECTED)}
    graph = denominator(3).anywhere() if chunk_frames else denominator(3)
    seen = []
    for minibatch in all_of(found):
        assert minibatch.chains is not None
        order = np.array([place[row.numpy().tobytes()] for row in minibatch.x_ND])
        assert torch.equal(minibatch.pdf_N, torch.from_numpy(TRAIN.pdf_T[order]).long())
        for at, rows in enumerate(np.split(order, np.cumsum(minibatch.lengths)[:-1])):
            assert set(np.diff(rows).tolist()) <= {3}
            # 4 frames are 2 outputs, rounded up
            chain, log_weight = chain_of(graph, TRAIN.pdf_T[rows], 2)
            assert minibatch.log_weight_B[at] == log_weight
            alone = Chains.of([chain])
            for column, wanted in zip(minibatch.chains[:5], alone[:5], strict=True):
                assert torch.equal(column[at, :len(chain.pdf_K)], wanted[0])
            assert minibatch.chains.end_B[at] == alone.end_B[0]
        seen += order.tolist()
    assert sorted(seen) == list(range(1000))
    # frames are stored once
    usual = reader(tmp_path, chunk_frames=chunk_frames)
    assert bytes_of(found.directory) < 2 * bytes_of(usual.directory)


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
    assert (found.index.num_left_out, sum(found.index.num_frames)) == (1, 1000 - 57)
    with pytest.raises(DataError, match="no path"):
        reader(tmp_path, replace(TRAIN, pdf_T=(np.arange(1000) % 2 * 5).astype(np.int32)))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    found = reader(tmp_path)
    path = next(found.directory.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DamagedArchiveError, match=path.name):
        all_of(found)
