"""Augmented copies of utterances by their names, and validation sets that leave no copy in train.

Forms: of ngsgd sp0.9-NAME, cp1-NAME, vc3x0.9124-NAME; of Kaldi rvb1_NAME, NAME-noise; of lhotse
NAME_sp0.9, NAME_vp2.0.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from ngsgd.asr.corpora.data_dir import UtteranceEntry
from ngsgd.asr.utterance import FramedUtterance, Utterance
from ngsgd.config import AugmentConfig
from ngsgd.data.columns import Selected, Strings
from ngsgd.errors import DataError

_SPEED = r"[st]p\d+\.\d+"
_OTHER = r"vp\d+\.\d+|cp\d+|(?:volume|vol|rvb|reverb|rev|noise|music|babble|aug)"
_PREFIX = re.compile(rf"(?:vc\d+(?:x\d\.\d+)?|{_SPEED}|(?:{_OTHER}(?=\d))(?:\d+(?:\.\d+)?)?)[-_](?=.)")
_SUFFIX = re.compile(rf"(?<=.)[-_](?:{_SPEED}|(?:{_OTHER})(?:\d+(?:\.\d+)?)?)$")
_AT_OTHER_SPEED = re.compile(rf"(?:^|[-_])(?:{_SPEED}|vc\d+x\d\.\d+)(?:[-_]|$)")
# option of the section `augment`: how its copies are named
_OWN = {"speed": _AT_OTHER_SPEED, "num_copies": re.compile(r"(?:^|-)cp\d+-"), "voice": re.compile(r"^vc\d+x\d\.\d{4}-")}


def original(name: str) -> str:
    """Return the name of an utterance or a speaker without the marks of copies.

    >>> original("cp1-sp0.9-anna"), original("anna_sp1.1_vp0.8"), original("anna")
    ('anna', 'anna', 'anna')
    """
    while (short := _SUFFIX.sub("", _PREFIX.sub("", name, count=1))) != name:
        name = short
    return name


def check_disjoint(listed: Mapping[str, Sequence[UtteranceEntry]]) -> None:
    """Raise DataError for an utterance in two sets, also as a copy; "added" is training data."""
    names = list(listed)
    set_U = np.repeat(np.arange(len(names)), [len(listed[name]) for name in names])
    first_N = np.searchsorted(set_U, np.arange(len(names)))
    is_training = [name in ("train", "added") for name in names]

    def at(u: int) -> UtteranceEntry:
        return listed[names[set_U[u]]][u - int(first_N[set_U[u]])]
    for is_copied in (False, True):
        hashes = array("q", (hash(original(one.utt_id) if is_copied else one.utt_id) for name in names for one in listed[name]))
        hash_N = np.array(hashes, np.int64)
        order_N = np.argsort(hash_N, kind="stable")
        begins = np.flatnonzero(np.diff(hash_N[order_N]) != 0) + 1
        for group in np.split(order_N, begins):
            for u, v in pairwise(group.tolist()):
                first, second = at(u), at(v)
                names_of_both = first.utt_id, second.utt_id
                is_apart = set_U[u] != set_U[v] and not (is_training[set_U[u]] and is_training[set_U[v]])
                source = original(first.utt_id)
                are_twins = source == original(second.utt_id) and (
                    source in names_of_both or all(map(_AT_OTHER_SPEED.search, names_of_both)))
                if is_copied and is_apart and are_twins:
                    raise DataError(f"{second.where}: {second.utt_id} and {first.utt_id} of "
                                    f"another set ({first.where}) are copies of one utterance, so "
                                    "a result would be too good; remove one of them.")
                if not is_copied and first.utt_id == second.utt_id:
                    raise DataError(f"{second.where}: {second.utt_id} is also in another set ({first.where}); give "
                                    "every utterance a unique name, or remove it from one of them.")


def check_unchanged(listed: Sequence[UtteranceEntry], changes: AugmentConfig) -> None:
    """Raise DataError for a copy, among training utterances, of the kind that the settings make."""
    is_used = {"speed": changes.speed != "none", "num_copies": changes.num_copies > 1, "voice": changes.voice}
    for option, pattern in _OWN.items():
        found = next((one for one in listed if pattern.search(one.utt_id)), None) if is_used[option] else None
        if found:
            raise DataError(f"{found.where}: {found.utt_id} is a copy, and augment.{option} would "
                            "change it again; remove the copies, or set data.labels=one_step "
                            "(data.labels=ladder has augment.speed=all).")


# with fewer speakers, holding out a speaker removes too much training data
_FEWEST_SPEAKERS = 4
SomeUtterance = TypeVar("SomeUtterance", UtteranceEntry, Utterance, FramedUtterance)


def hold_out(train: Sequence[SomeUtterance], *, share: float) -> tuple[Sequence[SomeUtterance], Sequence[SomeUtterance]]:
    """Split into (train, valid): complete speakers until `share` of the utterances is reached.

    With few speakers, single utterances are held out. The selection depends on the SHA-256 of the
    names alone. The copies of a held-out utterance are in neither set.
    """
    by_speaker = len({original(one.speaker) for one in train}) >= _FEWEST_SPEAKERS
    units = Strings(original(one.speaker if by_speaker else one.utt_id) for one in train)
    count, held, num_held = Counter(units), set[str](), 0
    for name in sorted(count, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if num_held < share * len(train):
            held.add(name)
            num_held += count[name]
    if num_held >= len(train):
        raise DataError(f"The training set has {len(train)} utterance(s), too few to hold any out "
                        "for validation; add data, or a validation set.")
    is_held = array("b", (unit in held for unit in units))
    originals = {one.utt_id for one, flag in zip(train, is_held, strict=True) if flag and original(one.utt_id) == one.utt_id}
    valid = (u for u, (one, flag) in enumerate(zip(train, is_held, strict=True))
             if flag and (one.utt_id in originals or original(one.utt_id) not in originals))
    return Selected(train, (u for u, flag in enumerate(is_held) if not flag)), Selected(train, valid)
