"""Names with control characters in pages."""

from __future__ import annotations

import re

import pytest

from ngsgd.launcher.reports import page

# what terminals execute or hide: C0 but for tab and newline, DEL, C1, marks that reorder text
CONTROLS = [chr(code) for code in (*range(9), *range(0xb, 0x20), 0x7f, *range(0x80, 0xa0), 0x202e, 0x2066)]


@pytest.mark.entry("Lo4", "make a report of a run whose names contain control characters", "works",
                   "They are written as text, such as `\\x1b`; nothing is executed by `cat` or `less -R`.")
def test_a_page_has_no_control_characters() -> None:
    name = "\x1b]0;pwn\x07".join(["", *CONTROLS, "name"])
    body = [page.heading(name), page.note(name), page.verdict("green", name, name), page.table((name, "b"), [(name, name)]),
            page.table(("a", "b"), [(page.Html(name), name)])]
    text = page.page(name, name, body, name)
    assert "name</h1>" in text and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "\\x1b" in text and text.count("\n") > 10
