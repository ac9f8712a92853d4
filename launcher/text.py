"""Texts for a terminal: control characters escaped and passwords masked."""

from __future__ import annotations

import re

from ngsgd.masking import MASK, conceal, is_masked, masked

__all__ = ["MASK", "conceal", "is_masked", "masked", "printable"]

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
# control characters: C0 but for newline and tab, DEL, C1, marks that reorder text, line separators,
# half characters
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control characters, such as \\x1b; newlines and tabs stay."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], _COLORS.sub("", text))
