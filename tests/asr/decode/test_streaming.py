"""Streaming gives what decoding the complete utterance gives, within its delay."""

from __future__ import annotations

import numpy as np
import pytest

from ngsgd.asr.corpora.digits import TOPOLOGY
from ngsgd.asr.decode import decoding
from ngsgd.asr.decode.decoding import Search, StreamingDecoder
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.data.archives import spliced_utterances
from ngsgd.data.frames import FrameSet, Side

LEFT, RIGHT, DIM = 4, 3, 6
GRAPH = graphs.with_word_penalty(graphs.build(Language(TOPOLOGY), silence_prob=0.0), 1.5)
SEARCH = Search(acoustic_scale=0.5, beam=16.0, max_active=7000)
RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.normal(size=((LEFT + 1 + RIGHT) * DIM, TOPOLOGY.num_pdfs)).astype(np.float32)


def score(x_TI: np.ndarray) -> np.ndarray:
    """Row by row, so that the size of a chunk cannot change the rounding."""
    return np.stack([row @ WEIGHT for row in x_TI])


def decoder(chunk_frames: int) -> StreamingDecoder:
    return StreamingDecoder(GRAPH, score, SEARCH, left_context=LEFT, right_context=RIGHT, chunk_frames=chunk_frames)


@pytest.mark.parametrize("num_frames", [1, 2, 6, 120])
@pytest.mark.parametrize("chunk_frames", [1, 7, 1000])
def test_words_states_and_cost_are_those_of_offline_decoding(chunk_frames: int, num_frames: int) -> None:
    features_TD = RANDOM.normal(size=(num_frames, DIM)).astype(np.float32)
    frames = FrameSet(features_TD, np.zeros(num_frames, np.int32), np.array([0, num_frames]), ("utt",))
    [x_TI] = spliced_utterances(frames, LEFT, RIGHT)
    whole = decoding.best_path(GRAPH, score(x_TI), SEARCH)
    streaming = decoder(chunk_frames)
    begin = 0
    while begin < num_frames:
        end = min(num_frames, begin + int(RANDOM.integers(1, 12)))
        streaming.accept(features_TD[begin:end])
        begin = end
        assert begin - streaming.num_decoded <= streaming.max_delay_frames
    found = streaming.finish()
    assert found.words == whole.words and np.array_equal(found.pdf_T, whole.pdf_T)
    # float32 sums of the decoder, begun again with every chunk
    assert found.cost == pytest.approx(whole.cost, rel=1e-6)


class Rows:
    """Known three frames later, as i-vectors of a context of three are."""

    right_context = 3

    def __init__(self, row_TS: np.ndarray) -> None:
        self.row_TS, self.num_frames = row_TS, 0

    def at(self, time_T: np.ndarray) -> np.ndarray:
        assert time_T.max() < self.num_frames - self.right_context or self.num_frames == len(self.row_TS)
        found_TS: np.ndarray = self.row_TS[time_T]
        return found_TS


@pytest.mark.parametrize("right", [0, 5])
def test_side_inputs_are_awaited_and_scored_with_their_frames(right: int) -> None:
    random = np.random.default_rng(1)
    features_TD, row_TS = (random.normal(size=(60, dim)).astype(np.float32) for dim in (DIM, 4))
    weight = random.normal(size=((LEFT + 1 + right) * DIM + 4, TOPOLOGY.num_pdfs)).astype(np.float32)

    def scored(x_TI: np.ndarray) -> np.ndarray:
        return np.stack([row @ weight for row in x_TI])
    side = Side(row_TS, np.arange(60, dtype=np.int32))
    frames = FrameSet(features_TD, np.zeros(60, np.int32), np.array([0, 60]), ("utt",), side=side)
    [x_TI] = spliced_utterances(frames, LEFT, right)
    whole = decoding.best_path(GRAPH, scored(x_TI), SEARCH)
    beside = Rows(row_TS)
    streaming = StreamingDecoder(GRAPH, scored, SEARCH, left_context=LEFT, right_context=right, chunk_frames=7, side=beside)
    assert streaming.max_delay_frames == max(right, 3) + 6
    for t in range(60):
        beside.num_frames += 1
        streaming.accept(features_TD[t:t + 1])
    found = streaming.finish()
    assert found.words == whole.words and np.array_equal(found.pdf_T, whole.pdf_T)


def test_words_are_available_before_the_end_and_grow() -> None:
    streaming = decoder(5)
    lengths = [len(streaming.words())]
    for _ in range(2):
        streaming.accept(RANDOM.normal(size=(80, DIM)).astype(np.float32))
        lengths.append(len(streaming.words()))
    assert 0 == lengths[0] < lengths[1] < lengths[2]
