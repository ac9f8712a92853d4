from collections.abc import Callable

import numpy as np
import pytest

from ngsgd.asr import forced_alignment, gaussians
from ngsgd.asr.corpus import Corpus
from ngsgd.asr.forced_alignment import States
from ngsgd.asr.gaussians import Axes, Gaussians
from ngsgd.asr.language import Language
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.topology import Topology
from ngsgd.asr.utterance import unaligned
from ngsgd.config import AlignConfig
from ngsgd.egs.frames import FrameSet
from ngsgd.errors import DataError
from tests.reference import gaussians as reference

TOPOLOGY = Topology(phones=("a", "b"), lexicon={"a": (("a",),), "b": (("b",),), "ab": (("a", "b"),)})


def made_up_speech(texts: list[tuple[str, ...]], rng: np.random.Generator) -> tuple[SpeechSet, np.ndarray]:
    """Utterances whose frames lie around a point of their own for each state; and the states they were made from."""
    centres_PD = np.random.default_rng(7).normal(scale=4.0, size=(TOPOLOGY.num_pdfs, 6))
    pieces = []
    for words in texts:
        pdfs = [0, *(pdf for word in words for pdf in (*TOPOLOGY.pdfs_of(TOPOLOGY.lexicon[word][0]), 0))]
        pieces.append(np.concatenate([np.full(int(rng.integers(3, 12)), pdf) for pdf in pdfs]))
    truth_T = np.concatenate(pieces)
    features_TD = (centres_PD[truth_T] + rng.normal(size=(len(truth_T), 6))).astype(np.float32)
    utt_ids = tuple(f"{len(texts)}-{u}" for u in range(len(texts)))
    frames = FrameSet(features_TD, unaligned(len(truth_T)), np.cumsum([0, *map(len, pieces)]), utt_ids)
    return SpeechSet(frames, tuple(texts), ("s",) * len(texts)), truth_T


def corpus_of(train: SpeechSet, valid: SpeechSet, test: SpeechSet) -> Corpus:
    return Corpus("made up", train, valid, test, Language(TOPOLOGY), "")


def draw_texts(rng: np.random.Generator, num_utterances: int) -> list[tuple[str, ...]]:
    return [tuple(rng.choice(["a", "b", "ab"], size=int(rng.integers(1, 5))).tolist()) for _ in range(num_utterances)]


def test_gaussians_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    pdf_T = rng.integers(4, size=60).astype(np.int32)
    pdf_T[pdf_T == 3] = 2
    pdf_T[:2] = 3  # a state with too few frames
    train_TK, x_TK = rng.normal(size=(60, 3)), rng.normal(size=(9, 3))
    train_TK[pdf_T == 1, 2] = 5.0  # a state without variance
    fast = Gaussians.fit(train_TK, pdf_T, 5).log_likelihood(x_TK)
    slow = reference.log_likelihood(x_TK, train_TK, pdf_T, 5, floor=gaussians.VARIANCE_FLOOR, fewest=gaussians.FEWEST_FRAMES)
    np.testing.assert_allclose(fast, slow, rtol=2e-5)  # returned in float32


def test_axes_decorrelate_and_scale_to_one() -> None:
    rng = np.random.default_rng(0)
    x_TD = (rng.normal(size=(5000, 4)) @ rng.normal(size=(4, 4)) + 3.0).astype(np.float32)
    rotated_TK = Axes.of(x_TD).apply(x_TD)[:, :4]
    np.testing.assert_allclose(np.cov(rotated_TK.T, bias=True), np.eye(4), atol=1e-5)


def test_differences_of_a_straight_line_are_its_slope() -> None:
    line_T1 = 3.0 * np.arange(20.0)[:, None]
    np.testing.assert_allclose(gaussians._differences(line_T1)[2:-2], 3.0)


@pytest.mark.parametrize(("num_frames", "expected"), [
    (18, [0] * 6 + [1] * 2 + [2] * 2 + [3] * 2 + [0] * 6), (4, [1, 1, 2, 3]), (3, [1, 2, 3]), (2, None),
])
def test_equal_parts(num_frames: int, expected: list[int] | None) -> None:
    path = forced_alignment.equal_parts(TOPOLOGY, ("a",), num_frames)
    assert (None if path is None else path.tolist()) == expected


# seed 1; from equal parts of all frames, words end up with some of the silence beside them: that is what the other start is for
@pytest.mark.parametrize(("start", "share"), [(forced_alignment.flat_start, 0.8), (forced_alignment.silence_start, 0.95)])
def test_gaussians_find_the_states_that_speech_was_made_from(start: Callable[[Corpus, str], States], share: float) -> None:
    pytest.importorskip("kaldi_decoder")
    rng = np.random.default_rng(1)
    (train, truth_T), (valid, _), (test, _) = (made_up_speech(draw_texts(rng, number), rng) for number in (40, 5, 6))
    corpus = corpus_of(train, valid, test)
    states = start(corpus, "")
    for _ in range(12):
        logliks = forced_alignment.score_by_gaussians(corpus, states)
        states = forced_alignment.realign(corpus, states, logliks, AlignConfig(), "").states
    found_T = np.concatenate([states[utt_id] for utt_id in train.frames.utt_ids])
    assert (found_T == truth_T).mean() > share


def test_short_utterances_are_left_out_and_no_utterance_at_all_is_an_error() -> None:
    rng = np.random.default_rng(1)
    sets = [made_up_speech(draw_texts(rng, number), rng)[0] for number in (4, 5, 6)]
    long = SpeechSet(sets[0].frames, (("ab",) * 40, *sets[0].texts[1:]), sets[0].speakers)
    assert set(forced_alignment.flat_start(corpus_of(long, sets[1], sets[2]), "")) == {
        utt_id for one in sets for utt_id in one.frames.utt_ids} - {"4-0"}
    hopeless = [SpeechSet(one.frames, (("ab",) * 99,) * len(one.texts), one.speakers) for one in sets]
    with pytest.raises(DataError, match="No utterance has as many frames"):
        forced_alignment.flat_start(corpus_of(*hopeless), "")
