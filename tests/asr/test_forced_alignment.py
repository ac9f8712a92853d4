import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.align import best_paths, forced_alignment
from ngsgd.asr.align.best_paths import TranscriptGraph
from ngsgd.asr.align.forced_alignment import Decorrelated, Score, States, Transcripts
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.features import gaussians
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import unaligned
from ngsgd.data import mapped
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError
from tests.reference import gaussians as reference
from tests.reference import graph_paths

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


def aligned(corpus: Corpus, *, realigns_at: Sequence[int]) -> States:
    """States of all sets, by mixtures of the training set."""
    x_TK, transcripts, starts = Decorrelated(corpus), Transcripts(corpus, ""), forced_alignment.flat_start(corpus, "")
    train = {utt_id: starts[utt_id] for utt_id in corpus.train.frames.utt_ids}
    mixtures, _ = forced_alignment.train_mixtures(transcripts, train, x_TK, corpus.num_pdfs, num_gaussians=8,
                                                  realigns_at=realigns_at)
    return forced_alignment.realign(transcripts, starts, forced_alignment.scores_of(mixtures, x_TK)).states


def draw_texts(rng: np.random.Generator, num_utterances: int) -> list[tuple[str, ...]]:
    return [tuple(rng.choice(["a", "b", "ab"], size=int(rng.integers(1, 5))).tolist()) for _ in range(num_utterances)]


def test_gaussians_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    pdf_T = rng.integers(4, size=60).astype(np.int32)
    pdf_T[pdf_T == 3] = 2
    pdf_T[:2] = 3  # a state with too few frames
    train_TK, x_TK = rng.normal(size=(60, 3)), rng.normal(size=(9, 3))
    train_TK[pdf_T == 1, 2] = 5.0  # a state without variance
    fitted, _ = gaussians.StateMixtures.single(lambda: [(train_TK, pdf_T)], 5)
    fast = fitted.log_likelihood(x_TK)
    slow = reference.log_likelihood(x_TK, train_TK, pdf_T, 5, floor=gaussians.VARIANCE_FLOOR, fewest=gaussians.FEWEST_FRAMES)
    np.testing.assert_allclose(fast, slow, rtol=2e-5)  # returned in float32
    some = fitted.log_likelihood(x_TK, np.array([0, 3]))
    np.testing.assert_allclose(some, slow[:, [0, 3]], rtol=2e-5)


def test_a_pass_of_em_is_that_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    x_TK, pdf_T = rng.normal(size=(400, 3)), rng.integers(2, size=400).astype(np.int32)
    x_TK += 3.0 * rng.integers(2, size=(400, 1))
    of = gaussians.StateMixtures(np.array([0, 0, 1, 1, 1]), np.log([0.4, 0.6, 0.2, 0.2, 0.6]), rng.normal(size=(5, 3)) + 1.5,
                                 rng.uniform(0.5, 2.0, (5, 3)))
    found, count_P = of.reestimated([(x_TK[:150], pdf_T[:150]), (x_TK[150:], pdf_T[150:])], np.full(3, 0.01))
    weight_G, mean_GK, variance_GK = reference.em_pass(x_TK, pdf_T, of.pdf_G, np.exp(of.log_weight_G), of.mean_GD, of.variance_GD)
    assert count_P == pytest.approx(np.bincount(pdf_T), rel=1e-12)
    np.testing.assert_allclose(np.exp(found.log_weight_G), weight_G, rtol=1e-9)
    np.testing.assert_allclose(found.mean_GD, mean_GK, rtol=1e-9)
    np.testing.assert_allclose(found.variance_GD, variance_GK, rtol=1e-9)
    # the precision of log_likelihood is that of float32
    in_float32, _ = of.reestimated([(x_TK.astype(np.float32), pdf_T)], np.full(3, 0.01))
    np.testing.assert_allclose(in_float32.mean_GD, mean_GK, rtol=1e-4, atol=1e-5)


def test_every_pass_raises_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    x_TK = np.concatenate([0.5 * rng.normal(size=(300, 2)) + 3.0 * k for k in range(3)])
    pieces = [(x_TK, np.zeros(900, np.int32))]
    mixtures = gaussians.StateMixtures.single(lambda: pieces, 1)[0].split(np.array([900.0]), 4, rng)
    likelihoods = []
    for _ in range(15):
        likelihoods.append(np.logaddexp.reduce(mixtures.log_joint(x_TK), axis=1).mean())
        mixtures, _count = mixtures.reestimated(pieces, np.zeros(2))
    assert len(mixtures.pdf_G) == 4 and likelihoods[-1] > likelihoods[0] + 0.1
    assert (np.diff(likelihoods) > -1e-12).all()  # rounding of a sum of 900


def test_mixtures_grow_by_the_frames_of_their_pdfs_and_explain_them_better() -> None:
    rng = np.random.default_rng(3)
    pdf_T = np.repeat([0, 1, 3], [2000, 200, 15]).astype(np.int32)
    x_TK = rng.normal(size=(len(pdf_T), 2)) + 4.0 * rng.integers(3, size=(len(pdf_T), 1))
    pieces = [(x_TK, pdf_T)]
    one, floor_K = gaussians.StateMixtures.single(lambda: pieces, 5)
    many = gaussians.train(lambda: pieces, 5, num_gaussians=16)
    num_P = np.bincount(many.pdf_G, minlength=5)
    # pdfs with hardly a frame, or without one, keep one Gaussian
    assert num_P[0] >= num_P[1] > 2 and num_P[2:].tolist() == [1, 1, 1]
    own_T = [np.take_along_axis(of.log_likelihood(x_TK), pdf_T[:, None].astype(np.int64), axis=1).mean() for of in (one, many)]
    assert own_T[1] > own_T[0] + 0.5
    assert (many.variance_GD >= floor_K).all()
    # bitwise identical again, and different with other frames
    again = gaussians.train(lambda: pieces, 5, num_gaussians=16)
    other = gaussians.train(lambda: [(x_TK[1:], pdf_T[1:])], 5, num_gaussians=16)
    assert np.array_equal(again.mean_GD, many.mean_GD) and not np.array_equal(other.mean_GD, many.mean_GD)


def test_features_that_are_not_kept_give_the_same_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kaldi_decoder")
    rng = np.random.default_rng(1)
    corpus = corpus_of(*(made_up_speech(draw_texts(rng, number), rng)[0] for number in (9, 2, 3)))

    kept = aligned(corpus, realigns_at=(1,))
    monkeypatch.setattr(forced_alignment, "FRAMES_AT_ONCE", 10)
    computed = aligned(corpus, realigns_at=(1,))
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


def test_axes_of_cepstra_are_scaled_and_those_of_bands_are_cosines() -> None:
    rng = np.random.default_rng(0)
    x_TD = (rng.normal(size=(5000, 15)) * rng.uniform(0.1, 3.0, 15) + 3.0).astype(np.float32)
    x_TD[:, 4] = 1.0
    rotated_TK = gaussians.Axes.of(x_TD).apply(x_TD)
    expected_TD = np.delete((x_TD - x_TD.mean(axis=0)) / np.maximum(x_TD.std(axis=0), 1e-9), 4, axis=1)[:, :12]
    # rounding of float32
    np.testing.assert_allclose(rotated_TK[:, :12], expected_TD, atol=1e-4)
    # bands with a smooth envelope
    smooth_TD = np.cumsum(rng.normal(size=(5000, 15)), axis=1).astype(np.float32)
    found_TK = gaussians.Axes.of(smooth_TD).apply(smooth_TD)[:, :gaussians.NUM_CEPSTRA]
    cosine_K = np.cos(np.pi / 15 * (np.arange(15) + 0.5) * 2)
    assert abs(np.corrcoef(found_TK[:, 2], smooth_TD @ cosine_K)[0, 1]) > 0.9999
    np.testing.assert_allclose(found_TK.std(axis=0), 1.0, rtol=1e-4)


def test_differences_of_a_straight_line_are_its_slope() -> None:
    line_T1 = 3.0 * np.arange(20.0)[:, None]
    np.testing.assert_allclose(gaussians.time_differences(line_T1)[2:-2], 3.0)


@pytest.mark.parametrize(("num_frames", "expected"), [
    (18, [0] * 6 + [1] * 2 + [2] * 2 + [3] * 2 + [0] * 6), (4, [1, 1, 2, 3]), (3, [1, 2, 3]),
    (2, None)])
def test_equal_parts(num_frames: int, expected: list[int] | None) -> None:
    path = forced_alignment.equal_parts(TOPOLOGY, ("a",), num_frames)
    assert (None if path is None else path.tolist()) == expected


def test_mixtures_find_states_that_speech_was_made_from() -> None:
    pytest.importorskip("kaldi_decoder")
    rng = np.random.default_rng(1)
    (train, truth_T), (valid, _), (test, _) = (made_up_speech(draw_texts(rng, number), rng) for number in (40, 5, 6))
    corpus = corpus_of(train, valid, test)

    def share_found(states: States) -> float:
        return float((np.concatenate([states[utt_id] for utt_id in train.frames.utt_ids]) == truth_T).mean())
    # words end up with some of the silence next to them
    begun, found = share_found(forced_alignment.flat_start(corpus, "")), share_found(aligned(corpus, realigns_at=range(1, 13)))
    assert found > 0.6 > begun + 0.1


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
    def read(of: dict[str, np.ndarray]) -> Score:
        return lambda utt_id, pdf_L: of[utt_id][:, pdf_L]

    untied = forced_alignment.realign(Transcripts(corpus, ""), before, read(scores))
    made = graphs.build(corpus.language, silence_prob=0.0)
    with tempfile.TemporaryDirectory() as folder:
        made.fst.write(f"{folder}/HCLG.fst")
        given = graphs.read(GivenGraph(Path(f"{folder}/HCLG.fst").read_bytes(), made.words,
                                       tuple(TIED_P.tolist())))
    found = forced_alignment.realign(Transcripts(corpus, "", given=given), before, read(logliks))
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


@pytest.mark.parametrize("seed", range(3))
def test_best_paths_of_a_batch_are_those_of_loops_whatever_the_batch(seed: int) -> None:
    pytest.importorskip("kaldifst")
    rng = np.random.default_rng(seed)
    topology = replace(TOPOLOGY, lexicon={**TOPOLOGY.lexicon, "ab": (("a", "b"), ("b",))}, num_silence_states=2)
    transcripts = [TranscriptGraph.of(graphs.of_transcript(topology, words)) for words in draw_texts(rng, 7)]
    # the last ones have fewer frames than states, some of them none that could end
    scores = [rng.normal(scale=3.0, size=(length, len(one.pdf_L))).astype(np.float32)
              for one, length in zip(transcripts, (40, 7, 25, 40, 31, 3, 1), strict=True)]
    found = best_paths.best_paths(transcripts, scores)
    assert max(score for _, score in found) > -np.inf == found[-1][1]
    for transcript, loglik_TL, (pdf_T, score) in zip(transcripts, scores, found, strict=True):
        column_T, expected = graph_paths.best_path(transcript.graph, loglik_TL)
        # sums of float32 over 40 frames
        assert score == pytest.approx(expected, rel=1e-4, abs=1e-3)
        if expected > -np.inf:
            assert pdf_T.tolist() == transcript.pdf_L[column_T].tolist()
    alone = [best_paths.best_paths([one], [loglik_TL])[0] for one, loglik_TL in zip(transcripts, scores, strict=True)]
    assert [(pdf_T.tolist(), score) for pdf_T, score in alone] == [(pdf_T.tolist(), score) for pdf_T, score in found]


def test_batches_hold_all_utterances_in_order_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_paths, "MOST_CELLS", 100)
    sizes = [(5, 3), (5, 3), (20, 3), (2, 1), (1, 1), (99, 9), (1, 1)]
    found = list(best_paths.batches(sizes))
    assert [u for batch in found for u in batch] == list(range(len(sizes)))
    assert found == [range(2), range(2, 5), range(5, 6), range(6, 7)]
    assert not list(best_paths.batches([]))
