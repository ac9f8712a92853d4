"""Texts of files and servers for a terminal: control characters escaped, passwords masked."""

from __future__ import annotations

import re

from ngsgd.masking import MASK, conceal, is_masked, masked

__all__ = ["MASK", "conceal", "is_masked", "masked", "printable"]

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
# what a terminal obeys: C0 but for newline and tab, DEL, C1, marks that reorder text, line
# separators, half characters
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with everything that a terminal would obey as an escape such as \\x1b; newlines and tabs stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], _COLORS.sub("", text))
