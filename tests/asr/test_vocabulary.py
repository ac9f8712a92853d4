"""Other words, grammars and language models at decoding time, and n-grams estimated from text."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.corpora.digits import TOPOLOGY
from ngsgd.asr.lang import arpa, grammar, graphs, ngram, vocabulary
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.errors import DataError
from tests.asr.decode.test_decoding import spell, words_of
from tests.reference import witten_bell

DIGITS = Language(TOPOLOGY)
PAIRS = """#JSGF V1.0 UTF-8;
grammar pairs;   // of digits
<digit> = zero | one | two | (three | four);
/* an even number, and
   perhaps a nine */
public <pairs> = (<digit> <digit>)+ [nine];
"""
ARPA = r"""The form of the file:
\1-grams:
p_1 wd_1 bo_wt_1

\data\
ngram 1=4
ngram 2=2

\1-grams:
-0.5 one -0.3
-0.7 two
-99 <s> -0.2
-0.4 </s>

\2-grams:
-0.1 <s> one
-0.2 one two

\end\
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def recognized(language: Language, said: list[str]) -> list[str]:
    graph = graphs.build(language, silence_prob=0.0)
    return list(words_of(graph, spell(TOPOLOGY, said, frames_per_state=3), beam=1000.0))


def test_a_grammar_allows_its_sentences_only(tmp_path: Path) -> None:
    pytest.importorskip("kaldi_decoder")
    changed = vocabulary.of_model(DIGITS, Vocabulary(grammar=write(tmp_path / "g", PAIRS)))
    for said in (["one", "two"], ["one", "two", "nine"], ["zero", "four", "three", "one"]):
        assert recognized(changed, said) == said
    assert len(recognized(changed, ["one", "two", "three"])) % 2 == 0
    assert "nine" not in recognized(changed, ["nine", "one"])[:-1]


@pytest.mark.parametrize("text", [
    "", "<a> = ;", "<a> = one", "<a> = one | ;", "<a> = (one;", "<a> = one]; ", "<a> = /0.5/ one;", "<a> = one {tag};",
    "a = one;", "<a> = one; <a> = two;", "<a> = " + "(" * 5000 + "one" + ")" * 5000 + ";", "= = =", "grammar", "public"])
def test_a_damaged_grammar_is_one_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError):
        grammar.read(write(tmp_path / "g", text))


@pytest.mark.parametrize("text", ["<a> = <b>;", "<a> = <b> one; <b> = [<a>];"])
def test_a_rule_that_is_missing_or_contains_itself_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError):
        grammar.read(write(tmp_path / "g", text)).acceptor({"one": 1})


def test_a_lexicon_brings_new_words_in_the_phones_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("kaldi_decoder")
    phones = TOPOLOGY.lexicon["one"][0] + TOPOLOGY.lexicon["two"][0]
    path = write(tmp_path / "lexicon", f"twelve {' '.join(phones)}\nzero {' '.join(TOPOLOGY.lexicon['zero'][0])}\n")
    changed = vocabulary.of_model(DIGITS, Vocabulary(lexicon=path))
    # the states of the network stay where they are
    assert changed.num_pdfs == DIGITS.num_pdfs
    assert recognized(changed, ["zero"]) == ["zero"]


def test_a_phone_that_the_model_lacks_is_one_error(tmp_path: Path) -> None:
    path = write(tmp_path / "lexicon", "house HH_X AW_X S_X\n")
    with pytest.raises(DataError, match="HH_X"):
        vocabulary.of_model(DIGITS, Vocabulary(lexicon=path))


def test_a_word_list_is_a_loop_of_these_words(tmp_path: Path) -> None:
    changed = vocabulary.of_model(DIGITS, Vocabulary(words=write(tmp_path / "w", "two\none\n\ntwo\n")))
    assert changed.topology.words == ("two", "one")
    with pytest.raises(DataError, match="eleven"):
        vocabulary.of_model(DIGITS, Vocabulary(words=write(tmp_path / "w", "eleven\n")))


def test_words_of_tied_states_cannot_be_changed(tmp_path: Path) -> None:
    tied = Language(Topology(("a",), {"a": (("a",),)}), given=GivenGraph(b"", ("a",), (0, 1, 2, 3, 4, 5)))
    with pytest.raises(DataError, match="tied"):
        vocabulary.of_model(tied, Vocabulary(words=write(tmp_path / "w", "a\n")))


def test_unknown_words_are_counted() -> None:
    found = vocabulary.unknown_words([["one", "ten"], ["ten", "eleven"]], DIGITS)
    assert (found.num_words, found.num_unknown) == (4, 3)
    assert found.most_frequent == (("ten", 2), ("eleven", 1))


def test_n_gram_costs_back_off() -> None:
    model = ngram.parse(ARPA)
    # the third: the weight of the history, then the unigram
    for history, word, log10 in (([arpa.BEGIN], "one", 0.1), (["two", "one"], "two", 0.2),
                                 (["one"], arpa.END, 0.3 + 0.4)):
        assert model.cost(history, word) == pytest.approx(log10 * math.log(10))
    assert model.cost([], "three") > 50.0


LETTERS = ("a", "b", "c", "d")


def texts(seed: int, words: tuple[str, ...] = LETTERS) -> list[tuple[str, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.choice(words, rng.integers(0, 6))) for _ in range(12)]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_are_those_of_the_recursion_and_sum_to_one(order: int) -> None:
    given = [text for seed in (1, 2) for text in texts(seed, ("a", "b", "c", "<unk>"))]
    model = ngram.estimate(given, order=order, vocabulary=LETTERS)
    targets = [*LETTERS, "<unk>", "</s>"]
    for length in range(3):
        for history in itertools.product(("<s>", *LETTERS), repeat=length):
            found = [math.exp(-model.cost(history, word)) for word in targets]
            expected = [witten_bell.probability(given, history, word, order=order,
                                                vocabulary=LETTERS) for word in targets]
            # float64 sums of at most six logarithms
            np.testing.assert_allclose(found, expected, rtol=1e-12)
            np.testing.assert_allclose(sum(found), 1.0, rtol=1e-12)


def test_a_model_read_back_from_arpa_has_its_costs() -> None:
    model = ngram.estimate(texts(3), order=3, vocabulary=LETTERS)
    read = ngram.parse(model.to_arpa())
    assert set(read.entries) == set(model.entries)
    for gram, values in model.entries.items():
        # seven decimals of a logarithm to base 10
        np.testing.assert_allclose(read.entries[gram], values, atol=2e-7)


def test_perplexity_counts_ends_and_omits_unknown_words() -> None:
    model = ngram.estimate([("a",), ("a",)], order=1, vocabulary=("a",))
    # a and </s>, each 1/2
    perplexity, num_unknown = model.perplexity([("a", "z"), ()])
    assert perplexity == pytest.approx(2.0) and num_unknown == 1
    with pytest.raises(DataError):
        ngram.estimate([], order=2, vocabulary=LETTERS)
