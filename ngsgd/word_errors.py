"""Counts behind a WER, as numbers; their text is made where it is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class WordErrors:
    """Counts over one or more utterances.

    >>> str(WordErrors(num_words=1000, insertions=4, deletions=7, substitutions=20))
    '%WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]'
    >>> str(WordErrors(num_words=0, insertions=2, deletions=0, substitutions=0))
    '%WER (no words) [ 2 / 0, 2 ins, 0 del, 0 sub ]'
    """

    num_words: int  # of the references
    insertions: int
    deletions: int
    substitutions: int

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> WordErrors:
        """Read the values of `asdict`; raises KeyError, TypeError and ValueError for others."""
        found = {spec.name: values[spec.name] for spec in fields(WordErrors)}
        if not all(type(count) is int and count >= 0 for count in found.values()):
            raise ValueError(f"{found} are no counts of words")
        return WordErrors(**found)

    @property
    def num_errors(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def wer(self) -> float:
        """WER in percent; NaN without reference words."""
        return 100.0 * self.num_errors / self.num_words if self.num_words else math.nan

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(self.num_words + other.num_words, self.insertions + other.insertions,
                          self.deletions + other.deletions, self.substitutions
                          + other.substitutions)

    def __str__(self) -> str:
        return self.line("%WER")

    def line(self, name: str) -> str:
        """Return the rate by that name, such as %CER of counts of characters, with the counts."""
        rate = f"{self.wer:.2f}" if self.num_words else "(no words)"
        counts = f"{self.insertions} ins, {self.deletions} del, {self.substitutions} sub"
        return f"{name} {rate} [ {self.num_errors} / {self.num_words}, {counts} ]"
