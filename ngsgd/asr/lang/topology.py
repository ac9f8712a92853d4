"""HMM states, which are pdfs here, and the pronunciations of words in them.

Silence has one or more states, from pdf 0; every phone has three, left to right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

STATES_PER_PHONE = 3
SILENCE_PDF = 0  # the first state of silence
SILENCE_PHONE = "SIL"  # allowed in pronunciations, as in `<UNK> SIL` of Kaldi

Pronunciation = tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """Phones, states and pronunciations of a corpus, as the decoder needs them."""

    phones: tuple[str, ...]  # without silence; their order determines the pdf ids
    lexicon: dict[str, tuple[Pronunciation, ...]]  # word -> one or more pronunciations
    num_silence_states: int = 1

    @property
    def num_pdfs(self) -> int:
        return self.num_silence_states + STATES_PER_PHONE * len(self.phones)

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(self.lexicon)

    @cached_property
    def word_labels(self) -> dict[str, int]:
        """Word -> its number in graphs, from 1."""
        return {word: number for number, word in enumerate(self.lexicon, start=1)}

    @property
    def silence_pdfs(self) -> tuple[int, ...]:
        return tuple(range(SILENCE_PDF, self.num_silence_states))

    def pdfs_of_phone(self, phone: str) -> tuple[int, ...]:
        if phone == SILENCE_PHONE:
            return self.silence_pdfs
        first = self.num_silence_states + STATES_PER_PHONE * self.phones.index(phone)
        return tuple(range(first, first + STATES_PER_PHONE))

    def spellings(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (word, its pdfs from left to right) for every pronunciation."""
        for word, pronunciations in self.lexicon.items():
            for phones in pronunciations:
                yield word, self.pdfs_of(phones)

    def pdfs_of(self, phones: Pronunciation) -> tuple[int, ...]:
        return tuple(pdf for phone in phones for pdf in self.pdfs_of_phone(phone))

    def to_json(self) -> dict[str, Any]:
        return {"phones": list(self.phones), "lexicon": {word: [list(p) for p in all_] for word, all_ in self.lexicon.items()},
                "num_silence_states": self.num_silence_states}

    @staticmethod
    def from_json(tree: dict[str, Any]) -> Topology:
        lexicon = {word: tuple(tuple(p) for p in all_) for word, all_ in tree["lexicon"].items()}
        return Topology(tuple(tree["phones"]), lexicon, tree["num_silence_states"])
