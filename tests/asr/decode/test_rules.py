"""Rules of scoring: reading, and the order in which they are applied."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ngsgd.asr.decode import scoring
from ngsgd.asr.decode.scoring import Rules
from ngsgd.errors import DataError


def test_lines_of_nist_are_read(tmp_path: Path) -> None:
    path = tmp_path / "en.glm"
    path.write_text(";; NIST\n# another comment\n\nuh  =>  / [ ] __ [ ]\nGONNA => GOING TO / [ ] __ [ ]\n[noise] => \nuh => \n")
    assert Rules.read(path) == Rules({("uh",): (), ("GONNA",): ("GOING", "TO"), ("[noise]",): ()})
    assert Rules.read(path, ignore_case=True)(["Gonna", "[NOISE]", "UH"]) == ("going", "to")
    assert Rules.read(None) == Rules()


@pytest.mark.parametrize(("text", "named"), [
    ("uh\n", "rules:1: 'uh'"), ("=> uh\n", "not a rule"), ("a => b => c\n", "not a rule"),
    ("a => { b / c }\n", "alternatives"), ("a => b / [ c ] __ [ ]\n", "contexts"),
    ("a => b\na => c\n", "rules:2: 'a'"), ("A => b\na => c\n", "another rule"),
    (";; nothing\n", "no rules"), ("a\u200b => b\n", "rules:1")])
def test_other_lines_are_an_error(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "rules").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=named):
        Rules.read(tmp_path / "rules", ignore_case=True)


def test_the_longest_rule_wins_from_left_to_right() -> None:
    rules = Rules({("a",): ("x",), ("a", "b"): ("b",), ("b", "c"): ("y", "a"), ("x",): ("never",)})
    assert rules(["a", "b", "c", "a", "a", "b"]) == ("b", "c", "x", "b")
    for words in itertools.product("abcd", repeat=4):
        # the made words are not changed again; a reference that is slow and plain
        made, left = list[str](), list(words)
        while left:
            for size in (2, 1, 0):
                if size and tuple(left[:size]) in rules.replacements:
                    made += rules.replacements[tuple(left[:size])]
                    break
            else:
                made.append(left[0])
            left = left[size or 1:]
        assert rules(words) == tuple(made)


def test_errors_in_characters_are_those_of_the_text_without_spaces() -> None:
    refs, hyps = [["ab", "c"], [], ["日本", "語"]], [["a", "bc"], ["x"], ["日", "語"]]
    _, rows = scoring.score(refs, hyps, ["1", "2", "3"])
    found = scoring.character_errors(rows)
    assert (found.num_words, found.insertions, found.deletions, found.substitutions) == (6, 1, 1, 0)
    assert found.line("%CER").startswith("%CER 33.33 [ 2 / 6,")
