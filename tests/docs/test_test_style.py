"""Tests do not depend on the wording of a message, private names or the clock (tests/style.py)."""

from __future__ import annotations

import re

import pytest

from tests import style
from tests.style import ALLOWED_PRIVATE, CLOCK, PRIVATE, PROSE, TESTS


@pytest.mark.slow
def test_no_unmarked_test_depends_on_wording_private_names_or_the_clock() -> None:
    assert [str(finding) for finding in style.findings()] == []


def test_every_private_name_in_the_list_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert [name for name in ALLOWED_PRIVATE if not re.search(rf"(?<!\w){name}\b", text)] == []


@pytest.mark.parametrize(("line", "kind"), [
    ("assert 'the model cannot be read' in str(error.value)", PROSE),
    ("assert capsys.readouterr().err == 'no model was found'", PROSE),
    ("with pytest.raises(ValueError, match=r'is not a .* folder of examples'): pass", PROSE),
    ("with pytest.raises(ValueError, match=f'the name {x} is not known here'): pass", PROSE),
    ("assert module._secret == 1", PRIVATE),
    ("monkeypatch.setattr(module, '_secret', 1)", PRIVATE),
    ("monkeypatch.setattr('package.module._secret', 1)", PRIVATE),
    ("from package.module import _secret", PRIVATE),
    ("assert time.monotonic() - began < 3.0", CLOCK),
])
def test_each_kind_is_found(line: str, kind: str) -> None:
    (found,) = style.findings_in(f"def test_it():\n    {line}\n", "test_it.py")
    assert (found.kind, found.line) == (kind, 2)


def test_sentences_among_the_cases_are_found_but_not_in_marked_tests() -> None:
    cases = "@pytest.mark.parametrize(('x', 'told'), [(1, 'x must be at least two')])\n"
    test = "def test_it(x, told):\n    with pytest.raises(ValueError, match=told):\n        f(x)\n"
    assert [found.kind for found in style.findings_in(cases + test, "test_it.py")] == [PROSE]


    line = "assert 'the model cannot be read' in str(error.value)"
    for mark in ("@pytest.mark.faults\n", "pytestmark = pytest.mark.slow\n"):
        assert style.findings_in(f"{mark}def test_it():\n    {line}\n", "test_it.py") == []


@pytest.mark.parametrize("line", [
    "assert 'optimizer.max_change is 1.5' in str(error.value)",
    "with pytest.raises(ValueError, match=r'train/text:3: .*train-s0-2'): pass",
    "assert found == 'a sentence that is no message'",
    "assert self._own == 1",
    "deadline = time.monotonic() + 60.0",
])
def test_names_and_numbers_are_allowed(line: str) -> None:
    assert style.findings_in(f"def test_it():\n    {line}\n", "test_it.py") == []
