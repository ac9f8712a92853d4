import math
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.decode import decoding
from ngsgd.asr.lang import graphs, openfst
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.errors import DataError
from tests.reference import graph_search

kaldifst = pytest.importorskip("kaldifst")

# "ab" begins "abb", "b" is also pronounced "ab" (as the other word), and <UNK> as silence
EXACT = decoding.Search(acoustic_scale=1.0, beam=1000.0, max_active=100000)
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
TWO_STATES = "0 1 1 2 0.5\n1 0.25\n"


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


def random_loglik(seed: int, num_frames: int | None = None, scale: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    num_frames = int(rng.integers(4, 9)) if num_frames is None else num_frames
    return rng.normal(scale=scale, size=(num_frames, TOPOLOGY.num_pdfs)).astype(np.float32)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("silence_prob", [0.0, 0.4])
def test_best_path_through_a_bigram_graph_is_that_of_trying_all_sequences(seed: int, silence_prob: float) -> None:
    pytest.importorskip("kaldilm")
    loglik_TP = random_loglik(seed)
    graph = graphs.build(Language(TOPOLOGY, arpa=BIGRAM), silence_prob=silence_prob)
    path = decoding.best_path(graph, loglik_TP, EXACT)
    costs = {words: bigram_cost(words) for words in sequences(3)}
    cost, _ = graph_search.best(TOPOLOGY, loglik_TP, word_cost=costs, silence_prob=silence_prob, max_words=3)
    # the graph's costs are rounded to 1e-5, log10 to natural in float32
    assert path.cost == pytest.approx(cost, abs=1e-3) and path.is_complete


@pytest.mark.parametrize("seed", range(6))
def test_best_path_through_a_graph_of_one_word_is_that_of_trying_all_words(seed: int) -> None:
    loglik_TP = random_loglik(seed, 14)
    graph = graphs.build(Language(TOPOLOGY, is_one_word=True), silence_prob=0.4)
    path = decoding.best_path(graph, loglik_TP, EXACT)
    costs: dict[tuple[str, ...], float] = {(word,): math.log(len(TOPOLOGY.words)) for word in TOPOLOGY.words}
    cost, words = graph_search.best(TOPOLOGY, loglik_TP, word_cost=costs, silence_prob=0.4, max_words=1)
    assert path.cost == pytest.approx(cost, abs=1e-3)
    assert len(path.words) == len(words) == 1


@pytest.mark.parametrize("seed", range(6))
def test_best_path_of_a_transcript_is_that_of_trying_all_pronunciations_and_silences(seed: int) -> None:
    loglik_TP = random_loglik(seed, 18)
    words = ("b", "ab")
    path = decoding.best_path(graphs.of_transcript(TOPOLOGY, words), loglik_TP, EXACT)
    cost, _ = graph_search.best(TOPOLOGY, loglik_TP, word_cost={words: 0.0}, silence_prob=0.0, max_words=2)
    assert path.words == words
    assert path.cost == pytest.approx(cost, abs=1e-4)
    assert path.cost == pytest.approx(-float(loglik_TP[np.arange(18), path.pdf_T].sum()), abs=1e-4)


def test_too_few_frames_for_a_transcript_give_no_complete_path() -> None:
    graph = graphs.of_transcript(TOPOLOGY, ("abb",))
    path = decoding.best_path(graph, np.zeros((8, TOPOLOGY.num_pdfs), np.float32), decoding.Search(1.0, 100.0, 1000))
    assert not path.is_complete


def test_a_word_penalty_is_paid_once_for_each_word() -> None:
    graph = graphs.build(Language(TOPOLOGY), silence_prob=0.0)
    loglik_TP = np.zeros((20, TOPOLOGY.num_pdfs), np.float32)
    path, dearer = (decoding.best_path(graphs.with_word_penalty(graph, penalty), loglik_TP, EXACT) for penalty in (-2.0, -3.0))
    assert len(path.words) == len(dearer.words) > 0  # as many as there is room for
    assert dearer.cost - path.cost == pytest.approx(-len(path.words), abs=1e-4)


def test_given_graph_is_read_at_the_level_of_pdfs(tmp_path: Path) -> None:
    fst = kaldifst.compile("0 1 1 2\n1 1 2 0\n1 2 3 0\n2\n")
    fst.write(f"{tmp_path}/HCLG.fst")
    given = GivenGraph((tmp_path / "HCLG.fst").read_bytes(), words=("no", "yes"), tid2pdf=(4, 4, 7))
    graph = graphs.read(given)
    assert Counter(arc.ilabel for state in range(3) for arc in kaldifst.ArcIterator(graph.fst, state)) == {5: 2, 8: 1}
    with pytest.raises(DataError, match=r"HCLG\.fst.*3:0.* 2 "):
        graphs.read(GivenGraph(given.hclg, words=("no", "yes"), tid2pdf=(4, 4)))


def test_given_graph_that_is_none_is_named() -> None:
    with pytest.raises(DataError, match=r"HCLG\.fst.*OpenFst"):
        graphs.read(GivenGraph(b"nothing", ("a",), (0,)))


def as_files(fst: object, folder: Path) -> tuple[bytes, bytes]:
    """The same transducer as a vector file and as a const file, both written by OpenFst."""
    fst.write(str(folder / "vector.fst"))  # type: ignore[attr-defined]
    kaldifst.StdConstFst(fst).write(str(folder / "const.fst"))
    return (folder / "vector.fst").read_bytes(), (folder / "const.fst").read_bytes()


@pytest.mark.entry("K1", "you give an HCLG.fst as `mkgraph.sh` writes it (a const FST), or a damaged one", "works",
                   "const and vector FSTs are read by a parser that checks every number; the graph is opened before the audio is "
                   "read and before training, and a damaged one is a `DataError`.")
def test_a_const_graph_decodes_as_its_vector_form(tmp_path: Path) -> None:
    made = graphs.build(Language(TOPOLOGY), silence_prob=0.4)
    vector, const = as_files(made.fst, tmp_path)
    assert vector != const and b"const" in const[:20]
    identity = tuple(range(TOPOLOGY.num_pdfs))
    read = [graphs.read(GivenGraph(content, TOPOLOGY.words, identity)) for content in (vector, const)]
    assert list(graphs.arcs(read[0])) == list(graphs.arcs(read[1])) == list(graphs.arcs(made))
    loglik_TP = random_loglik(0, 30, scale=3.0)
    paths = [decoding.best_path(graph, loglik_TP, decoding.Search(1.0, 100.0, 1000)) for graph in (made, *read)]
    assert paths[0].words and paths[0].words == paths[1].words == paths[2].words
    assert paths[0].pdf_T.tolist() == paths[1].pdf_T.tolist() == paths[2].pdf_T.tolist()
    assert paths[0].cost == paths[1].cost == paths[2].cost


def header_int64(content: bytes, at: int, value: int) -> bytes:
    """The content with the `at`-th of start, number of states, number of arcs replaced."""
    begin = content.index(b"standard") + 8 + 16 + 8 * at
    return content[:begin] + value.to_bytes(8, "little", signed=True) + content[begin + 8:]


@pytest.mark.entry("K1")
@pytest.mark.parametrize("form", [0, 1], ids=["vector", "const"])
def test_a_damaged_graph_is_a_data_error_and_never_a_crash(tmp_path: Path, form: int) -> None:
    """Every cut and header number out of range; other random bytes are refused or within bounds."""
    content = as_files(kaldifst.compile("0 1 1 2 0.5\n1 1 2 0 0.25\n1 2 3 0\n2 1.5\n"), tmp_path)[form]

    def check(damaged: bytes) -> openfst.Fst:
        return graphs.check(GivenGraph(damaged, words=("no", "yes"), tid2pdf=(4, 4, 7)))
    assert check(content).num_states == 3
    for end in range(len(content)):
        with pytest.raises(DataError, match=r"HCLG\.fst.*OpenFst"):
            check(content[:end])
    for at, value in [(0, -1), (0, 3), (1, 1 << 40), (1, -7), *([(2, 1 << 61), (2, 1), (2, -2)] if form else [])]:
        with pytest.raises(DataError):
            check(header_int64(content, at, value))
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(content)
        changed[int(rng.integers(len(content)))] = int(rng.integers(256))
        try:
            found = check(bytes(changed))
        except DataError:
            continue
        assert 0 <= found.start < found.num_states and set(found.arc_A["target"].tolist()) <= set(range(found.num_states))


def test_a_const_graph_of_an_older_openfst_with_aligned_arrays_and_symbols_is_read(tmp_path: Path) -> None:
    """Byte by byte: version 1 pads both arrays to 16 bytes; two tables of symbols come before."""
    content = as_files(kaldifst.compile(TWO_STATES), tmp_path)[1]
    head, body = content[:content.index(b"standard") + 8], content[content.index(b"standard") + 48:]
    symbols = struct.pack("<ii1sqqi2sq", 2125658996, 1, b"s", 1, 1, 2, b"ab", 0)
    header = head + struct.pack("<iiQqqq", 1, 3, 0, 0, 2, 1) + 2 * symbols
    states, arcs = body[:40], body[40:]
    aligned = header + bytes(-len(header) % 16) + states
    aligned += bytes(-len(aligned) % 16) + arcs
    found, expected = openfst.parse(aligned, "it"), openfst.parse(content, "it")
    assert found.arc_A.tolist() == expected.arc_A.tolist() == [(1, 2, 0.5, 1)]
    assert found.final_S.tolist() == expected.final_S.tolist() == [math.inf, 0.25]


def test_a_vector_graph_from_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """OpenFst writes -1 states where it cannot go back to the header; other types are named."""
    content = as_files(kaldifst.compile(TWO_STATES), tmp_path)[0]
    assert openfst.parse(header_int64(content, 1, -1), "it").final_S.tolist() == [math.inf, 0.25]
    with pytest.raises(DataError, match=r"compa.* const"):
        openfst.parse(content.replace(b"vector", b"compac"), "it")
