import numpy as np
import pytest

from ngsgd.asr.corpora.digits import TOPOLOGY
from ngsgd.asr.decode import decoding
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import SILENCE_PDF, Topology
from tests.reference import viterbi

pytest.importorskip("kaldi_decoder")

SMALL = Topology(phones=("a", "b"), lexicon={"ab": (("a", "b"),), "b": (("b",), ("b", "a")), "aa": (("a", "a"),)})


def spell(topology: Topology, words: list[str], *, frames_per_state: int) -> np.ndarray:
    """Log-likelihoods that favor these words, with silence around each."""
    spellings = dict(topology.spellings())
    pdfs = [SILENCE_PDF] * 5
    for word in words:
        pdfs += [pdf for pdf in spellings[word] for _ in range(frames_per_state)] + [SILENCE_PDF] * 3
    loglik_TP = np.full((len(pdfs), topology.num_pdfs), -5.0, dtype=np.float32)
    loglik_TP[np.arange(len(pdfs)), pdfs] = 0.0
    return loglik_TP


def digit_loop(topology: Topology, word_penalty: float) -> graphs.Graph:
    return graphs.with_word_penalty(graphs.build(Language(topology), silence_prob=0.0), word_penalty)


def words_of(graph: graphs.Graph, loglik_TP: np.ndarray, beam: float = 30.0) -> tuple[str, ...]:
    return decoding.best_path(graph, loglik_TP, decoding.Search(1.0, beam, 100000)).words


@pytest.mark.parametrize("said", ["nine nine one zero seven five four three six eight two", ""])
def test_clear_speech_is_decoded_to_its_words_and_silence_to_none(said: str) -> None:
    loglik_TP = spell(TOPOLOGY, said.split(), frames_per_state=3)
    assert words_of(digit_loop(TOPOLOGY, 0.0), loglik_TP) == tuple(said.split())


def test_a_higher_word_penalty_gives_fewer_words() -> None:
    rng = np.random.default_rng(0)
    loglik_TP = rng.normal(size=(200, TOPOLOGY.num_pdfs)).astype(np.float32)
    lengths = [len(words_of(digit_loop(TOPOLOGY, penalty), loglik_TP, beam=200.0)) for penalty in (0.0, 3.0, 30.0)]
    assert lengths[0] > lengths[1] > lengths[2]


@pytest.mark.parametrize("seed", range(20))
def test_wide_beam_finds_the_path_of_exhaustive_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = SMALL if seed % 2 else TOPOLOGY
    num_frames = int(rng.integers(1, 40))
    loglik_TP = rng.normal(scale=3.0, size=(num_frames, topology.num_pdfs)).astype(np.float32)
    expected = viterbi.best_path(topology, loglik_TP, acoustic_scale=0.5, word_penalty=1.5)
    path = decoding.best_path(digit_loop(topology, 1.5), loglik_TP, decoding.Search(0.5, 1000.0, 100000))
    assert path.words == expected.words
    # the decoder adds up in float32, and the graph's costs are rounded to 1e-5 a word
    assert path.cost == pytest.approx(expected.cost, rel=1e-5, abs=1e-3)
    assert len(path.pdf_T) == num_frames
