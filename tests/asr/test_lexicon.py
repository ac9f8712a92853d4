"""Pronunciation dictionaries of Kaldi, MFA and CMU: probabilities and comments are never phones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngsgd.asr.corpora import data_dir
from ngsgd.asr.kaldi_io.tables import Entry
from ngsgd.asr.lang import lexicon, vocabulary
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.errors import DataError, NgsgdWarning
from tests.asr import tiny_recognizer

PLAIN = "alpha A B\nalpha B A\nbeta B C\n"
# form: lines, number of columns
WITH_NUMBERS = {
    "lexiconp.txt": ("alpha 0.7 A B\nalpha 0.3 B A\nbeta 1.0 B C\n", 1),
    "all one": ("alpha 1 A B\nalpha 1 B A\nbeta 1 B C\n", 1),
    "exponents": ("alpha 7e-1 A B\nalpha .3 B A\nbeta 1 B C\n", 1),
    "comma": ("alpha 0,7 A B\nalpha 0,3 B A\nbeta 1 B C\n", 1),
    "percent": ("alpha 70 A B\nalpha 30 B A\nbeta 100 B C\n", 1),
    "lexiconp_silprob.txt": ("alpha 0.7 0.2 1.1 0.9 A B\nalpha 0.3 0.2 1.1 0.9 B A\nbeta 1.0 0.4 1 1 B C\n", 4),
    "MFA": ("alpha\t0.99\t0.28\t1.28\t0.95\tA B\nalpha\t0.01\t0.28\t1\t1\tB A\nbeta\t1\t0.5\t1.5\t0.5\tB C\n", 4),
}


def read(path: Path, text: str) -> tuple[Topology, list[str]]:
    path.write_text(text)
    said: list[str] = []
    return lexicon.read(path, 1, said.append), said


@pytest.mark.entry("Sp2", "give a dictionary with probabilities (lexiconp.txt, MFA) or comments (cmudict)", "works",
                   "probabilities are not used, as one line reports; comments are skipped; numbers in some lines are a `DataError`")
@pytest.mark.parametrize("form", WITH_NUMBERS)
def test_columns_of_numbers_are_dropped_with_a_line(form: str, tmp_path: Path) -> None:
    plain, nothing = read(tmp_path / "plain", PLAIN)
    assert nothing == []
    text, num_columns = WITH_NUMBERS[form]
    found, said = read(tmp_path / "lexicon", text)
    assert found == plain
    assert len(said) == 1 and f" {num_columns} " in said[0] and "lexicon" in said[0]


@pytest.mark.entry("Sp2")
@pytest.mark.parametrize("text", [
    "alpha 0.7 A B\nbeta B C\n", "alpha A B\nbeta 0.7 B C\n", "alpha 0.7 0.2 A B\nbeta 0.3 B C\n", "alpha A 0.7 B\n",
    "alpha 0.7\nbeta 0.3\n", "alpha A B #place\n", "alpha A #1\n", "# a comment of words\nalpha A\n", "alpha # A B\n"])
def test_other_numbers_and_marks_are_one_error_with_the_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lexicon:\d"):
        read(tmp_path / "lexicon", text)


@pytest.mark.entry("Sp2")
def test_digits_of_x_sampa_are_phones(tmp_path: Path) -> None:
    for text, phones in (("peu p 2\noeuf 9 f\n", ("2", "9", "f", "p")),
                         ("oeuf 9 f\noeufs 2 z\n", ("2", "9", "f", "z")),
                         ("alpha 10 11\nbeta 11 12\n", ("10", "11", "12"))):
        found, said = read(tmp_path / "lexicon", text)
        assert (found.phones, said) == (phones, [])


@pytest.mark.entry("Sp2")
def test_comments_of_cmudict_are_skipped(tmp_path: Path) -> None:
    text = ";;; # CMUdict\n##\n## old header\nalpha A B # place, danish\nalpha(2) B A\nbeta B C # A\n"
    assert read(tmp_path / "lexicon", text) == read(tmp_path / "plain", PLAIN)


def test_a_dictionary_with_probabilities_is_found_by_its_usual_name(tmp_path: Path) -> None:
    (tmp_path / "dict").mkdir()
    for name in ("lexiconp.txt", "lexicon.txt"):
        (tmp_path / "dict" / name).write_text("alpha A\n")
        assert lexicon.locate("", tmp_path) == tmp_path / "dict" / name


def test_numbers_of_a_lexicon_for_decoding_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "lexicon").write_text("YES 0.5 Y\nNO 1 N\n")
    with pytest.warns(NgsgdWarning, match="lexicon"):
        changed = vocabulary.of_model(tiny_recognizer.LANGUAGE, Vocabulary(lexicon=tmp_path / "lexicon"))
    assert changed.topology.lexicon == {"YES": (("Y",),), "NO": (("N",),)}


@pytest.mark.entry("Sp3")
@pytest.mark.parametrize(("word", "known"), [("e\u0301t", "\u00e9t"), ("\u00e9t", "e\u0301t"), ("\u212bm", "\u00c5m"),
                                             ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u062e")])
def test_words_that_look_the_same_are_named_by_their_code_points(word: str, known: str, tmp_path: Path) -> None:
    topology = Topology(("A",), {"x": (("A",),), known: (("A",),)})
    one = data_dir.UtteranceEntry("u1", "s1", (word,), Entry("a.ark:1", "feats.scp:1"), "text:1")
    (tmp_path / "words").write_text(f"{word}\n")
    for check in (lambda: data_dir.check_words([one], topology.lexicon, "lexicon.txt", ""),
                  lambda: vocabulary.of_model(Language(topology), Vocabulary(words=tmp_path / "words"))):
        with pytest.raises(DataError) as caught:
            check()
        for char in {*word, *known}:
            assert f"U+{ord(char):04X}" in str(caught.value)


def test_a_word_in_other_case_is_named() -> None:
    assert "gamma" in lexicon.alike("GAMMA", ["alpha", "gamma"])
    assert lexicon.alike("GAMMA", ["alpha", "beta"]) == ""
