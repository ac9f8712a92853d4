import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.align import forced_alignment, gaussians
from ngsgd.asr.align.forced_alignment import States
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import unaligned
from ngsgd.data import mapped
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError
from tests.reference import gaussians as reference

TOPOLOGY = Topology(phones=("a", "b"), lexicon={"a": (("a",),), "b": (("b",),), "ab": (("a", "b"),)})


def made_up_speech(texts: list[tuple[str, ...]], rng: np.random.Generator) -> tuple[SpeechSet, np.ndarray]:
    """Utterances whose frames lie around a separate point for each state; and these states."""
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
    fitted = gaussians.Gaussians.fit(lambda: [(train_TK, pdf_T)], 5)
    fast = fitted.log_likelihood(x_TK)
    slow = reference.log_likelihood(x_TK, train_TK, pdf_T, 5, floor=gaussians.VARIANCE_FLOOR, fewest=gaussians.FEWEST_FRAMES)
    np.testing.assert_allclose(fast, slow, rtol=2e-5)  # returned in float32
    some = fitted.log_likelihood(x_TK, [0, 3])
    np.testing.assert_allclose(some[:, [0, 3]], slow[:, [0, 3]], rtol=2e-5)
    assert not some[:, [1, 2, 4]].any()


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 4000]])
def test_gaussians_of_pieces_have_the_bits_of_all_frames_at_once(cuts: list[int]) -> None:
    rng = np.random.default_rng(0)
    x_TK, pdf_T = 5.0 + rng.normal(size=(5000, 6)), rng.integers(3, size=5000).astype(np.int32)
    pieces = list(zip(np.split(x_TK, cuts), np.split(pdf_T, cuts), strict=True))
    found = gaussians.Gaussians.fit(lambda: pieces, 4)
    count_P1 = np.bincount(pdf_T, minlength=4)[:, None]
    safe_P1 = np.maximum(count_P1, 1.0)
    mean_PK, square_PK = (gaussians.sums_by_state(y_TK, pdf_T, 4) / safe_P1 for y_TK in (x_TK, x_TK**2))
    variance_PK = np.maximum(square_PK - mean_PK**2, gaussians.VARIANCE_FLOOR * x_TK.var(axis=0))
    # the last state has no frames
    assert np.array_equal(found.mean_PK, np.where(count_P1, mean_PK, x_TK.mean(axis=0)))
    assert np.array_equal(found.variance_PK, np.where(count_P1, variance_PK, x_TK.var(axis=0)))


def test_features_that_are_not_kept_give_the_same_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kaldi_decoder")
    rng = np.random.default_rng(1)
    corpus = corpus_of(*(made_up_speech(draw_texts(rng, number), rng)[0] for number in (9, 2, 3)))

    def aligned() -> States:
        states = forced_alignment.silence_start(corpus, "")
        scores = forced_alignment.score_by_gaussians(corpus, states, "", forced_alignment.Decorrelated(corpus))
        return forced_alignment.realign(corpus, states, scores, "").states
    kept = aligned()
    monkeypatch.setattr(forced_alignment, "FRAMES_AT_ONCE", 10)
    computed = aligned()
    assert all(np.array_equal(computed[utt_id], kept[utt_id]) for utt_id in kept)


def test_axes_of_many_frames_are_those_of_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TD = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)
    expected = gaussians.Axes.of(x_TD)
    monkeypatch.setattr(gaussians, "FRAMES_AT_ONCE", 999)
    found = gaussians.Axes.of(x_TD)
    assert np.array_equal(found.mean_D, expected.mean_D)
    # another order of the sum
    np.testing.assert_allclose(found.rotation_DK, expected.rotation_DK, rtol=1e-10)


def test_labels_of_some_utterances_keep_their_features_in_memory_or_in_a_file(tmp_path: Path) -> None:
    speech, _ = made_up_speech([("a",), ("b",), ("ab", "a")], np.random.default_rng(0))
    features = mapped.write_rows(tmp_path / "features.npy", speech.frames.features_TD.shape, [speech.frames.features_TD])
    in_file = replace(speech, frames=replace(speech.frames, features_TD=features))
    labels = {utt_id: np.full(length, u, np.int32)
              for u, (utt_id, length) in enumerate(zip(speech.frames.utt_ids, np.diff(speech.frames.offsets), strict=True))}
    assert in_file.labelled(labels).frames.features_TD is features
    del labels["3-1"]
    few, few_in_file = speech.labelled(labels), in_file.labelled(labels)
    assert isinstance(few_in_file.frames.features_TD, np.memmap)
    for one in (few, few_in_file):
        assert one.frames.utt_ids == ("3-0", "3-2")
        assert np.array_equal(one.frames.features_TD, np.concatenate([speech.only(u).frames.features_TD for u in (0, 2)]))
        assert np.array_equal(one.frames.pdf_T, np.concatenate(list(labels.values())))


def test_axes_decorrelate_and_scale_to_one() -> None:
    rng = np.random.default_rng(0)
    x_TD = (rng.normal(size=(5000, 4)) @ rng.normal(size=(4, 4)) + 3.0).astype(np.float32)
    rotated_TK = gaussians.Axes.of(x_TD).apply(x_TD)[:, :4]
    np.testing.assert_allclose(np.cov(rotated_TK.T, bias=True), np.eye(4), atol=1e-5)


def test_differences_of_a_straight_line_are_its_slope() -> None:
    line_T1 = 3.0 * np.arange(20.0)[:, None]
    np.testing.assert_allclose(gaussians.time_differences(line_T1)[2:-2], 3.0)


@pytest.mark.parametrize(("num_frames", "expected"), [
    (18, [0] * 6 + [1] * 2 + [2] * 2 + [3] * 2 + [0] * 6), (4, [1, 1, 2, 3]), (3, [1, 2, 3]),
    (2, None)])
def test_equal_parts(num_frames: int, expected: list[int] | None) -> None:
    path = forced_alignment.equal_parts(TOPOLOGY, ("a",), num_frames)
    assert (None if path is None else path.tolist()) == expected


# seed 1; from equal parts of all frames, words end up with some of the silence next to them: that
# is what the other start is for
@pytest.mark.parametrize(("start", "share"), [(forced_alignment.flat_start, 0.8), (forced_alignment.silence_start, 0.95)])
def test_gaussians_find_the_states_that_speech_was_made_from(start: Callable[[Corpus, str], States], share: float) -> None:
    pytest.importorskip("kaldi_decoder")
    rng = np.random.default_rng(1)
    (train, truth_T), (valid, _), (test, _) = (made_up_speech(draw_texts(rng, number), rng) for number in (40, 5, 6))
    corpus = corpus_of(train, valid, test)
    states = start(corpus, "")
    for _ in range(12):
        logliks = forced_alignment.score_by_gaussians(corpus, states, "", forced_alignment.Decorrelated(corpus))
        states = forced_alignment.realign(corpus, states, logliks, "").states
    found_T = np.concatenate([states[utt_id] for utt_id in train.frames.utt_ids])
    assert (found_T == truth_T).mean() > share


def test_short_utterances_are_skipped_and_no_utterance_is_an_error() -> None:
    rng = np.random.default_rng(1)
    sets = [made_up_speech(draw_texts(rng, number), rng)[0] for number in (4, 5, 6)]
    long = SpeechSet(sets[0].frames, (("ab",) * 40, *sets[0].texts[1:]), sets[0].speakers)
    assert set(forced_alignment.flat_start(corpus_of(long, sets[1], sets[2]), "")) == {
        utt_id for one in sets for utt_id in one.frames.utt_ids} - {"4-0"}
    hopeless = [SpeechSet(one.frames, (("ab",) * 99,) * len(one.texts), one.speakers) for one in sets]
    with pytest.raises(DataError, match="utterance"):
        forced_alignment.flat_start(corpus_of(*hopeless), "")


# numbers of a tree in which states of different phones are one pdf; silence is in the middle
TIED_P = np.array([2, 0, 3, 1, 3, 4, 1], np.int32)


@pytest.mark.entry("K15")
@pytest.mark.parametrize("seed", range(4))
def test_a_graph_with_tied_states_gives_its_own_states(seed: int) -> None:
    """A graph with these words has the paths of the transcript's, each state by its tied number."""
    pytest.importorskip("kaldi_decoder")
    rng = np.random.default_rng(seed)
    texts: list[tuple[str, ...]] = [("ab", "b"), ("a",), ("b", "ab", "a")]
    sets = [made_up_speech(texts, rng)[0] for _ in range(3)]
    corpus = corpus_of(*(replace(one, frames=replace(one.frames, utt_ids=tuple(f"{number}-{name}" for name in one.frames.utt_ids)))
                         for number, one in enumerate(sets)))
    logliks = {utt_id: rng.normal(scale=2.0, size=(len(features_TD), 5)).astype(np.float32)
               for one in (corpus.train, corpus.valid, corpus.test)
               for utt_id, features_TD in zip(one.frames.utt_ids, one.split_features(), strict=True)}
    before = {utt_id: np.zeros(len(loglik_TP), np.int32) for utt_id, loglik_TP in logliks.items()}
    scores = {utt_id: loglik_TP[:, TIED_P] for utt_id, loglik_TP in logliks.items()}
    untied = forced_alignment.realign(corpus, before, scores, "")
    made = graphs.build(corpus.language, silence_prob=0.0)
    with tempfile.TemporaryDirectory() as folder:
        made.fst.write(f"{folder}/HCLG.fst")
        given = graphs.read(GivenGraph(Path(f"{folder}/HCLG.fst").read_bytes(), made.words,
                                       tuple(TIED_P.tolist())))
    found = forced_alignment.realign(corpus, before, logliks, "", given)
    assert not found.lost and not untied.lost
    for utt_id, loglik_TP in logliks.items():
        expected = TIED_P[untied.states[utt_id]]
        score = [float(loglik_TP[np.arange(len(loglik_TP)), states].sum(dtype=np.float64))
                 for states in (found.states[utt_id], expected)]
        # sums of float32 in another order; two paths may score the same
        assert score[0] == pytest.approx(score[1], abs=1e-3)
        assert found.states[utt_id].max() <= TIED_P.max()
    same = np.mean([(found.states[utt_id] == TIED_P[untied.states[utt_id]]).mean() for utt_id in logliks])
    assert same > 0.99


def test_a_word_that_the_graph_lacks_is_named() -> None:
    pytest.importorskip("kaldi_decoder")
    made = graphs.build(Language(TOPOLOGY), silence_prob=0.0)
    with pytest.raises(DataError, match=r"words\.txt"):
        graphs.within(made, ("a", "c"))
