"""A valid set out of the training set, where a corpus has none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from ngsgd.errors import DataError

# below that, holding out a speaker takes too much away from training
_FEWEST_SPEAKERS = 4


class _HasSpeaker(Protocol):
    """An utterance in whatever form: a name, and who says it."""

    @property
    def utt_id(self) -> str: ...
    @property
    def speaker(self) -> str: ...


SomeUtterance = TypeVar("SomeUtterance", bound=_HasSpeaker)


def hold_out(train: Sequence[SomeUtterance], *, share: float) -> tuple[list[SomeUtterance], list[SomeUtterance]]:
    """(train, valid): whole speakers until `share` of the utterances is reached; utterances where there are few speakers.

    Who is held out depends on the names alone: in the order of their SHA-256, so that neither the order of the files nor
    other speakers' coming and going change it much.
    """
    by_speaker = len({one.speaker for one in train}) >= _FEWEST_SPEAKERS
    unit = [one.speaker if by_speaker else one.utt_id for one in train]
    held: set[str] = set()
    num_held = 0
    for name in sorted(set(unit), key=lambda name: hashlib.sha256(name.encode()).digest()):
        if num_held >= share * len(train):
            break
        held.add(name)
        num_held += unit.count(name)
    if num_held >= len(train):
        raise DataError(f"The training set has {len(train)} utterance(s), too few to hold any out for valid; add data, or give a "
                        "valid set.")
    return ([one for one, name in zip(train, unit, strict=True) if name not in held],
            [one for one, name in zip(train, unit, strict=True) if name in held])
