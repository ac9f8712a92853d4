"""Validation sets from the training set, for corpora without one."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from ngsgd.asr.corpora import copies
from ngsgd.data.columns import Selected, Strings
from ngsgd.errors import DataError

# with fewer speakers, holding out a speaker removes too much training data
_FEWEST_SPEAKERS = 4


class _HasSpeaker(Protocol):
    """An utterance in any representation with a name and a speaker."""

    @property
    def utt_id(self) -> str: ...
    @property
    def speaker(self) -> str: ...


SomeUtterance = TypeVar("SomeUtterance", bound=_HasSpeaker)


def hold_out(train: Sequence[SomeUtterance], *, share: float) -> tuple[Sequence[SomeUtterance], Sequence[SomeUtterance]]:
    """Split into (train, valid): complete speakers until `share` of the utterances is reached.

    With few speakers, single utterances are held out. The selection depends on the names alone, in
    the order of their SHA-256. It is therefore independent of the order of the files, and nearly
    independent of added or removed speakers.

    Augmented copies (`ngsgd.asr.corpora.copies`) go with their original: the copies of a held-out
    utterance are in neither set.
    """
    by_speaker = len({copies.original(one.speaker) for one in train}) >= _FEWEST_SPEAKERS
    units = Strings(copies.original(one.speaker if by_speaker else one.utt_id) for one in train)
    count, held, num_held = Counter(units), set[str](), 0
    for name in sorted(count, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if num_held < share * len(train):
            held.add(name)
            num_held += count[name]
    if num_held >= len(train):
        raise DataError(f"The training set has {len(train)} utterance(s), too few to hold any out "
                        "for validation; add data, or a validation set.")
    is_held = array("b", (unit in held for unit in units))
    originals = {one.utt_id for one, flag in zip(train, is_held, strict=True)
                 if flag and copies.original(one.utt_id) == one.utt_id}
    valid = (u for u, (one, flag) in enumerate(zip(train, is_held, strict=True))
             if flag and (one.utt_id in originals or copies.original(one.utt_id) not in originals))
    return Selected(train, (u for u, flag in enumerate(is_held) if not flag)), Selected(train, valid)
