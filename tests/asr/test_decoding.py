import numpy as np
import pytest

from ngsgd.asr import decoding
from ngsgd.asr.digit_labels import TOPOLOGY
from ngsgd.asr.topology import SILENCE_PDF, Topology
from tests.reference import viterbi

pytest.importorskip("kaldi_decoder")

SMALL = Topology(phones=("a", "b"), lexicon={"ab": (("a", "b"),), "b": (("b",), ("b", "a")), "aa": (("a", "a"),)})


def spell(topology: Topology, words: list[str], *, frames_per_state: int) -> np.ndarray:
    """Log-likelihoods that favour these words, with silence around each."""
    spellings = dict(topology.spellings())
    pdfs = [SILENCE_PDF] * 5
    for word in words:
        pdfs += [pdf for pdf in spellings[word] for _ in range(frames_per_state)] + [SILENCE_PDF] * 3
    loglik_TP = np.full((len(pdfs), topology.num_pdfs), -5.0, dtype=np.float32)
    loglik_TP[np.arange(len(pdfs)), pdfs] = 0.0
    return loglik_TP


def test_clear_speech_is_decoded_to_its_words() -> None:
    words = ["nine", "nine", "one", "zero", "seven", "five", "four", "three", "six", "eight", "two"]
    graph = decoding.build_graph(TOPOLOGY, word_penalty=0.0)
    loglik_TP = spell(TOPOLOGY, words, frames_per_state=3)
    assert decoding.decode(graph, loglik_TP, acoustic_scale=1.0, beam=30.0, max_active=7000) == tuple(words)


def test_silence_is_decoded_to_no_words() -> None:
    graph = decoding.build_graph(TOPOLOGY, word_penalty=0.0)
    loglik_TP = spell(TOPOLOGY, [], frames_per_state=1)
    assert decoding.decode(graph, loglik_TP, acoustic_scale=1.0, beam=30.0, max_active=7000) == ()


def test_a_higher_word_penalty_gives_fewer_words() -> None:
    rng = np.random.default_rng(0)
    loglik_TP = rng.normal(size=(200, TOPOLOGY.num_pdfs)).astype(np.float32)
    lengths = [len(decoding.decode(decoding.build_graph(TOPOLOGY, penalty), loglik_TP, acoustic_scale=1.0, beam=200.0,
                                   max_active=100000)) for penalty in (0.0, 3.0, 30.0)]
    assert lengths[0] > lengths[1] > lengths[2]


@pytest.mark.parametrize("seed", range(20))
def test_wide_beam_finds_the_path_of_exhaustive_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = SMALL if seed % 2 else TOPOLOGY
    num_frames = int(rng.integers(1, 40))
    loglik_TP = rng.normal(scale=3.0, size=(num_frames, topology.num_pdfs)).astype(np.float32)
    expected = viterbi.best_path(topology, loglik_TP, acoustic_scale=0.5, word_penalty=1.5)
    graph = decoding.build_graph(topology, word_penalty=1.5)
    words, cost = decoding.best_path(graph, loglik_TP, acoustic_scale=0.5, beam=1000.0, max_active=100000)
    assert words == expected.words
    assert cost == pytest.approx(expected.cost, rel=1e-5, abs=1e-4)  # the decoder adds up in float32
