"""The training transcripts decide between words with the same pronunciation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.decode import evaluation
from ngsgd.asr.lang import graphs, lexicon, vocabulary
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.config import DecodeConfig
from tests.asr.decode.test_decoding import spell, words_of

COUNTS = {"NO": 50, "O": 20, "OH": 8}
LEXICON: dict[str, tuple[tuple[str, ...], ...]] = {"NO": (("N", "OW"),), "O": (("OW",),), "OH": (("OW",),)}
TOPOLOGY = Topology(("N", "OW"), LEXICON)
MADE = DecodeConfig(graph="made", silence_prob=0.5)


def graph_of(topology: Topology, counts: Mapping[str, int]) -> graphs.Graph:
    return evaluation.build_graph(Language(topology, word_counts=counts), MADE)


@pytest.mark.parametrize("order", [("NO", "O", "OH"), ("OH", "O", "NO")])
@pytest.mark.parametrize(("counts", "better"), [(COUNTS, "O"), ({"O": 2, "OH": 3}, "OH"), ({"O": 1}, "O")])
def test_the_more_frequent_homophone_is_recognized(order: tuple[str, ...], counts: dict[str, int], better: str) -> None:
    pytest.importorskip("kaldi_decoder")
    topology = Topology(("N", "OW"), {word: LEXICON[word] for word in order})
    graph = graph_of(topology, counts)
    rng = np.random.default_rng(0)
    for num_words in range(1, 8):
        loglik_TP = spell(topology, [better] * num_words, frames_per_state=4)
        loglik_TP += rng.normal(scale=0.3, size=loglik_TP.shape).astype(np.float32)
        assert words_of(graph, loglik_TP) == (better,) * num_words


def test_a_cost_is_a_thousandth_of_the_negative_log_probability() -> None:
    found = lexicon.homophone_costs(LEXICON, COUNTS)
    assert found == {word: pytest.approx(-0.001 * math.log(count / (50 + 20 + 8 + 3)))
                     for word, count in (("O", 21), ("OH", 9))}
    assert lexicon.homophone_costs(LEXICON, {}) == {}
    assert lexicon.homophone_costs({"A": (("EY",), ("AH",)), "AY": (("EY",),), "UH": (("AH",),)},
                                   {"A": 1}).keys() == {"A", "AY", "UH"}


def test_other_costs_remain() -> None:
    kaldifst = pytest.importorskip("kaldifst")
    plain, graph = graph_of(TOPOLOGY, {}), graph_of(TOPOLOGY, COUNTS)
    added = {0: 0.0, **{TOPOLOGY.word_labels[word]: cost for word, cost in lexicon.homophone_costs(LEXICON, COUNTS).items()}}
    for state in range(plain.fst.num_states):
        for old, new in zip(*(kaldifst.ArcIterator(one.fst, state) for one in (plain, graph)), strict=True):
            assert (old.ilabel, old.olabel, old.nextstate) == (new.ilabel, new.olabel, new.nextstate)
            # float32
            assert new.weight.value == pytest.approx(old.weight.value + added.get(old.olabel, 0.0), abs=1e-6)


def test_a_language_model_that_prefers_the_rare_word_decides() -> None:
    pytest.importorskip("kaldi_decoder")
    pytest.importorskip("kaldilm")
    arpa = "\\data\\\nngram 1=5\n\n\\1-grams:\n-0.5 </s>\n-99 <s>\n-1.0 NO\n-1.1 O\n-1.0 OH\n\n\\end\\\n"
    graph = evaluation.build_graph(Language(TOPOLOGY, arpa, word_counts=COUNTS), MADE)
    assert words_of(graph, spell(TOPOLOGY, ["O", "O"], frames_per_state=4)) == ("OH", "OH")


def test_a_new_homophone_of_another_lexicon_loses_to_the_word_of_training(tmp_path: Path) -> None:
    pytest.importorskip("kaldi_decoder")
    (tmp_path / "lexicon").write_text("AU OW\nO OW\nOWE OW\n")
    changed = vocabulary.of_model(Language(TOPOLOGY, word_counts=COUNTS),
                                  vocabulary.Vocabulary(lexicon=tmp_path / "lexicon"))
    loglik_TP = spell(TOPOLOGY, ["O"], frames_per_state=4)
    assert words_of(evaluation.build_graph(changed, MADE), loglik_TP) == ("O",)


def test_words_are_counted_and_stored() -> None:
    counts = lexicon.count_words([("B", "A"), (), ("B",)])
    assert list(counts.items()) == [("A", 1), ("B", 2)]
    language = Language(TOPOLOGY, word_counts=counts)
    assert Language.from_json(language.to_json(), {}) == language
