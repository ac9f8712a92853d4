import math
from collections import Counter

import numpy as np
import pytest

from ngsgd.asr import decoding, graphs
from ngsgd.asr.language import GivenGraph, Language
from ngsgd.asr.topology import Topology
from ngsgd.errors import DataError
from tests.reference import graph_search

kaldifst = pytest.importorskip("kaldifst")

# "ab" begins "abb", "b" is also said "ab" (as the other word is), and <UNK> is said as silence
TOPOLOGY = Topology(phones=("a", "b"), num_silence_states=2, lexicon={
    "ab": (("a", "b"),), "b": (("b",), ("a", "b")), "abb": (("a", "b", "b"),), "<UNK>": (("SIL",),)})
BIGRAM = """\\data\\
ngram 1=5
ngram 2=2

\\1-grams:
-0.6 </s>
-99 <s> -0.3
-0.5 ab -0.2
-0.7 b -0.1
-0.9 <UNK> 0.0

\\2-grams:
-0.2 <s> b
-0.1 b ab

\\end\\
"""
LOG10 = math.log(10)


def bigram_cost(words: tuple[str, ...]) -> float:
    """-log probability, by the rule of back-off."""
    one = {"</s>": -0.6, "ab": -0.5, "b": -0.7, "<UNK>": -0.9}
    two, backoff = {("<s>", "b"): -0.2, ("b", "ab"): -0.1}, {"<s>": -0.3, "ab": -0.2, "b": -0.1, "<UNK>": 0.0}
    pairs = list(zip(("<s>", *words), (*words, "</s>"), strict=True))
    return -LOG10 * sum(two.get(pair, backoff.get(pair[0], 0.0) + one.get(pair[1], -math.inf)) for pair in pairs)


def sequences(max_words: int) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for _ in range(max_words):
        found += [(*words, word) for words in found for word in TOPOLOGY.words if (*words, word) not in found]
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("silence_prob", [0.0, 0.4])
def test_best_path_through_a_bigram_graph_is_that_of_trying_all_sequences(seed: int, silence_prob: float) -> None:
    pytest.importorskip("kaldilm")
    rng = np.random.default_rng(seed)
    loglik_TP = rng.normal(scale=2.0, size=(int(rng.integers(4, 9)), TOPOLOGY.num_pdfs)).astype(np.float32)
    graph = graphs.build(Language(TOPOLOGY, arpa=BIGRAM), silence_prob=silence_prob)
    path = decoding.best_path(graph, loglik_TP, acoustic_scale=1.0, beam=1000.0, max_active=100000)
    costs = {words: bigram_cost(words) for words in sequences(3)}
    cost, _ = graph_search.best(TOPOLOGY, loglik_TP, word_cost=costs, silence_prob=silence_prob, max_words=3)
    assert path.cost == pytest.approx(cost, abs=1e-3)  # the graph's costs are rounded to 1e-5, log10 to natural in float32
    assert path.is_complete


@pytest.mark.parametrize("seed", range(6))
def test_best_path_through_a_graph_of_one_word_is_that_of_trying_all_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loglik_TP = rng.normal(scale=2.0, size=(14, TOPOLOGY.num_pdfs)).astype(np.float32)
    graph = graphs.build(Language(TOPOLOGY, is_one_word=True), silence_prob=0.4)
    path = decoding.best_path(graph, loglik_TP, acoustic_scale=1.0, beam=1000.0, max_active=100000)
    costs: dict[tuple[str, ...], float] = {(word,): math.log(len(TOPOLOGY.words)) for word in TOPOLOGY.words}
    cost, words = graph_search.best(TOPOLOGY, loglik_TP, word_cost=costs, silence_prob=0.4, max_words=1)
    assert path.cost == pytest.approx(cost, abs=1e-3)
    assert len(path.words) == len(words) == 1


@pytest.mark.parametrize("seed", range(6))
def test_best_path_of_a_transcript_is_that_of_trying_all_pronunciations_and_silences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loglik_TP = rng.normal(scale=2.0, size=(18, TOPOLOGY.num_pdfs)).astype(np.float32)
    words = ("b", "ab")
    path = decoding.best_path(graphs.of_transcript(TOPOLOGY, words), loglik_TP, acoustic_scale=1.0, beam=1000.0, max_active=100000)
    cost, _ = graph_search.best(TOPOLOGY, loglik_TP, word_cost={words: 0.0}, silence_prob=0.0, max_words=2)
    assert path.words == words
    assert path.cost == pytest.approx(cost, abs=1e-4)
    assert path.cost == pytest.approx(-float(loglik_TP[np.arange(18), path.pdf_T].sum()), abs=1e-4)


def test_too_few_frames_for_a_transcript_give_no_complete_path() -> None:
    graph = graphs.of_transcript(TOPOLOGY, ("abb",))
    path = decoding.best_path(graph, np.zeros((8, TOPOLOGY.num_pdfs), np.float32), acoustic_scale=1.0, beam=100.0, max_active=1000)
    assert not path.is_complete


def test_a_word_penalty_is_paid_once_for_each_word() -> None:
    graph = graphs.build(Language(TOPOLOGY), silence_prob=0.0)
    loglik_TP = np.zeros((20, TOPOLOGY.num_pdfs), np.float32)
    path, dearer = (decoding.best_path(graphs.with_word_penalty(graph, penalty), loglik_TP, acoustic_scale=1.0, beam=1000.0,
                                       max_active=100000) for penalty in (-2.0, -3.0))
    assert len(path.words) == len(dearer.words) > 0  # as many as there is room for
    assert dearer.cost - path.cost == pytest.approx(-len(path.words), abs=1e-4)


def test_given_graph_is_read_at_the_level_of_pdfs(tmp_path: object) -> None:
    fst = kaldifst.compile("0 1 1 2\n1 1 2 0\n1 2 3 0\n2\n")
    path = f"{tmp_path}/HCLG.fst"
    fst.write(path)
    with open(path, "rb") as file:
        given = GivenGraph(file.read(), words=("no", "yes"), tid2pdf=(4, 4, 7))
    graph = graphs.read(given)
    assert Counter(arc.ilabel for state in range(3) for arc in kaldifst.ArcIterator(graph.fst, state)) == {5: 2, 8: 1}
    with pytest.raises(DataError, match=r"HCLG\.fst has the labels 3:0, beyond its 2 transitions"):
        graphs.read(GivenGraph(given.hclg, words=("no", "yes"), tid2pdf=(4, 4)))


def test_given_graph_that_is_none_is_named() -> None:
    with pytest.raises(DataError, match=r"HCLG\.fst is damaged or not an OpenFst file"):
        graphs.read(GivenGraph(b"nothing", ("a",), (0,)))
