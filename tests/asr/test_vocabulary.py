"""Other words, grammars and language models at decoding time."""

from pathlib import Path

import pytest

from ngsgd.asr.corpora.digits.labels import TOPOLOGY
from ngsgd.asr.lang import arpa, grammar, graphs, ngram, vocabulary
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.errors import DataError
from tests.asr.decode.test_decoding import spell, words_of

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
    changed = vocabulary.of_model(
        DIGITS, Vocabulary(grammar=write(tmp_path / "g", PAIRS))
    )
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
    ln10 = 2.302585092994046
    assert model.cost([arpa.BEGIN], "one") == pytest.approx(0.1 * ln10)
    assert model.cost(["two", "one"], "two") == pytest.approx(0.2 * ln10)
    # the weight of the history, then the unigram
    assert model.cost(["one"], arpa.END) == pytest.approx((0.3 + 0.4) * ln10)
    assert model.cost([], "three") > 50.0
