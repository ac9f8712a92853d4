import math

import numpy as np
import pytest

from ngsgd.asr.corpora.digits import TOPOLOGY
from ngsgd.asr.decode import decoding, words
from ngsgd.asr.decode.decoding import Search
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from tests.asr.decode.test_decoding import SMALL, digit_loop, spell
from tests.reference import word_lattice

pytest.importorskip("kaldi_decoder")

EXACT = Search(acoustic_scale=0.5, beam=1000.0, max_active=100000)


def noise(seed: int, shape: tuple[int, ...] = (8, SMALL.num_pdfs), scale: float = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


def recognized(graph: Graph, loglik_TP: np.ndarray, num_best: int = 1, search: Search = EXACT,
               lattice_beam: float = 1000.0) -> list[words.Hypothesis]:
    return words.recognized(graph, loglik_TP, search, lattice_beam=lattice_beam, frame_shift_s=0.01,
                            num_best=num_best)


def every_sequence(graph: Graph, loglik_TP: np.ndarray) -> list[tuple[float, tuple[str, ...]]]:
    paths = word_lattice.paths(graph, loglik_TP.astype(np.float64), EXACT.acoustic_scale)
    return word_lattice.best_sequences(paths)


def text(hypothesis: words.Hypothesis) -> tuple[str, ...]:
    return tuple(word.word for word in hypothesis.words)


@pytest.mark.parametrize("seed", range(5))
def test_n_best_are_the_best_sequences_of_all_paths(seed: int) -> None:
    graph, loglik_TP = digit_loop(SMALL, 1.0), noise(seed)
    expected = every_sequence(graph, loglik_TP)[:6]
    found = recognized(graph, loglik_TP, num_best=6)
    assert [text(one) for one in found] == [sequence for _, sequence in expected]
    # the costs of a lattice have six digits
    assert [one.cost for one in found] == pytest.approx([cost for cost, _ in expected], abs=1e-3)
    assert all(one.is_complete for one in found)


@pytest.mark.parametrize("seed", range(5))
def test_confidences_are_sums_over_all_word_sequences(seed: int) -> None:
    graph, loglik_TP = digit_loop(SMALL, 1.0), noise(seed)
    every = every_sequence(graph, loglik_TP)
    # where a word is repeated, an alignment with fewer of them is not unique
    found = [one for one in recognized(graph, loglik_TP, num_best=6)
             if len(set(text(one))) == len(one.words)]
    assert len(found) > 1
    for hypothesis in found:
        # the recursion takes expectations of distances, which is not quite an alignment of each
        expected = word_lattice.confidences(every, text(hypothesis))
        assert [word.confidence for word in hypothesis.words] == pytest.approx(expected, abs=0.02)


def test_times_are_those_of_the_states() -> None:
    said = ["nine", "nine", "one", "seven"]
    loglik_TP = spell(TOPOLOGY, said, frames_per_state=3)
    [found] = recognized(digit_loop(TOPOLOGY, 0.0), loglik_TP, lattice_beam=8.0)
    assert text(found) == tuple(said)
    start = 5
    for word, name in zip(found.words, said, strict=True):
        end = start + 3 * len(dict(TOPOLOGY.spellings())[name])
        assert (word.start_s, word.end_s) == pytest.approx((start / 100, end / 100))
        assert word.confidence == pytest.approx(1.0, abs=1e-3)
        start = end + 3


def test_words_of_a_graph_without_topology_follow_each_other() -> None:
    graph = digit_loop(TOPOLOGY, 0.0)
    loglik_TP = spell(TOPOLOGY, ["two", "six"], frames_per_state=3)
    first, second = recognized(Graph(graph.fst, graph.words), loglik_TP, lattice_beam=8.0)[0].words
    assert 0.0 < first.start_s < first.end_s == second.start_s < second.end_s
    assert second.end_s == pytest.approx(len(loglik_TP) / 100)


def test_ambiguous_words_share_their_posterior() -> None:
    # equally likely: the same sounds
    topology = Topology(phones=("a",), lexicon={"one": (("a",),), "won": (("a",),)})
    graph = graphs.build(Language(topology), silence_prob=0.0)
    found = recognized(graph, spell(topology, ["one"], frames_per_state=5), num_best=2)
    assert {text(one) for one in found} == {("one",), ("won",)}
    # some paths say a word twice
    assert [one.words[0].confidence for one in found] == pytest.approx([0.5, 0.5], abs=0.05)


def test_the_best_path_is_that_of_best_path() -> None:
    graph, search = digit_loop(TOPOLOGY, 2.0), Search(0.3, 100.0, 100000)
    for seed in range(3):
        loglik_TP = noise(seed, (60, TOPOLOGY.num_pdfs), scale=3.0)
        best = decoding.best_path(graph, loglik_TP, search)
        [found] = recognized(graph, loglik_TP, search=search, lattice_beam=2.0)
        assert text(found) == best.words
        assert found.cost == pytest.approx(best.cost, abs=1e-2)


def test_an_utterance_without_frames_has_no_words_and_a_too_short_one_is_not_complete() -> None:
    found = recognized(digit_loop(SMALL, 0.0), np.zeros((0, SMALL.num_pdfs), np.float32))
    assert found == [words.Hypothesis((), math.inf, is_complete=False)]
    topology = Topology(phones=("a",), lexicon={"a": (("a",),)})
    graph = graphs.build(Language(topology, is_one_word=True), silence_prob=0.0)
    assert not recognized(graph, np.zeros((1, topology.num_pdfs), np.float32))[0].is_complete
