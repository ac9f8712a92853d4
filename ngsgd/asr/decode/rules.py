"""Rules that change references and recognized words in the same way before they are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ngsgd.asr.kaldi_io import lines
from ngsgd.errors import DataError

# in NIST's files: with any words before and after
_ANYWHERE = re.compile(r"\s*/\s*\[\s*\]\s*__\s*\[\s*\]$")
_OF_OTHER_FORMS = {"{", "}", "/", "__", "=>"}


@dataclass(frozen=True)
class Rules:
    """Replacements of word sequences, and whether case counts.

    At each place the rule with the most words on its left side is applied, from left to right.
    Words that a rule has made are not changed again.

    >>> rules = Rules({("oh",): ("o",), ("uh",): (), ("ice", "cream"): ("icecream",)}, ignore_case=True)
    >>> rules("Uh OH ice cream ice".split())
    ('o', 'icecream', 'ice')
    """

    replacements: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    ignore_case: bool = False

    @staticmethod
    def read(path: Path | None, *, ignore_case: bool = False) -> Rules:
        """Read lines `WORD WORD => WORD WORD`, as in NIST's glm files; the right side may be empty.

        Lines that begin with ;; or # are comments. The context `/ [ ] __ [ ]` of NIST, which allows
        any words before and after, is ignored. Raises DataError for lines of another form, for two
        rules with one left side, and for a file without rules.
        """
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for where, line in lines.read(path) if path else ():
            if line.startswith((";;", "#")):
                continue
            text = _ANYWHERE.sub("", line.casefold() if ignore_case else line)
            left, arrow, right = text.partition("=>")
            before, after = tuple(left.split()), tuple(right.split())
            if not arrow or not before or _OF_OTHER_FORMS & {*before, *after}:
                raise DataError(f"{where}: {line!r} is not a rule; write WORD WORD => WORD WORD, without "
                                "alternatives and contexts.")
            if found.setdefault(before, after) != after:
                raise DataError(f"{where}: {' '.join(before)!r} has another rule above; remove one.")
        if path and not found:
            raise DataError(f"{path} has no rules; write lines WORD WORD => WORD WORD.")
        return Rules(found, ignore_case)

    def __call__(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return the words to compare."""
        left = [word.casefold() for word in words] if self.ignore_case else list(words)
        longest, made = max(map(len, self.replacements), default=0), list[str]()
        while left:
            sizes = (size for size in range(min(longest, len(left)), 0, -1) if tuple(left[:size]) in self.replacements)
            size = next(sizes, 0)
            made += self.replacements[tuple(left[:size])] if size else left[:1]
            del left[:size or 1]
        return tuple(made)
