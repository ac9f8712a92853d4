"""The prose checker reports words, sentences, lines and spellings with their place."""

from __future__ import annotations

import re

from tools.prose import (
    LINE,
    SENTENCE,
    SPELLING,
    WORD,
    Paragraph,
    WordList,
    examine,
    markdown,
    python,
)

WORDS = WordList({WORD: [(re.compile(r"\bmends?\b"), "fix")],
                  SPELLING: [(re.compile(r"\bcolours?\b"), "color")]}, [("docs/*", "mends socks")])


def found(paragraphs: list[Paragraph], path: str = "README.md") -> list[tuple[int, str]]:
    return [(finding.line, finding.kind) for paragraph in paragraphs
            for finding in examine(paragraph, path, WORDS)]


def test_markdown_is_read_outside_code() -> None:
    text = "# A colour\n\nIt `mends` and\nmends.\n\n    mends code\n\n```\nmends code\n```\n| mends | [x](mends.md) |\n"
    assert found([*markdown(text, "README.md")]) == [(1, SPELLING), (4, WORD), (11, WORD)]


def test_long_sentences_and_wide_lines() -> None:
    long = "word " * 20 + "\n" + "word " * 20 + "\n"
    assert found([*markdown(long, "")]) == [(1, SENTENCE)]
    assert found([*markdown("a" * 101 + "\n\n- [text](" + "a" * 101 + ")\n", "")]) == [(1, LINE)]


def test_python_is_read_in_docstrings_comments_and_strings() -> None:
    text = ('"""Sums.\n\nIt mends.\n\n    >>> mends()\n    mends\n"""\n'
            'x = "# mends"  # it mends\ny = f"this {x} mends all things"\nmends = 1\n')
    assert sorted(found([*python(text, "ngsgd/x.py")])) == [(3, WORD), (8, WORD), (9, WORD)]
    assert sorted(found([*python(text, "tests/x.py")])) == [(3, WORD), (8, WORD)]


def test_an_exception_covers_its_files_only() -> None:
    paragraph = Paragraph(1, ["She mends socks."])
    assert found([paragraph], "docs/x.md") == []
    assert found([paragraph], "README.md") == [(1, WORD)]
