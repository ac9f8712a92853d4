"""Division of a set into shards: about ten minutes of speech each, in the order of recordings."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd.asr.corpora import data_dir
from ngsgd.asr.corpora.data_dir import UtteranceEntry
from ngsgd.asr.features.audio import Piece
from ngsgd.config import AugmentConfig, FeatureConfig

SHARD_S = 600.0
# assumed length of an utterance whose features are given
_GIVEN_S = 10.0


@dataclass(frozen=True)
class Part:
    """Utterances of a set that are changed alike.

    Attributes:
        name: unique name of the part, such as "train" or "train-added".
        listed: the utterances, in the order of the set.
        changes: augmentation. Default: none.
        folder: folder of given features. Default: the working directory.
    """

    name: str
    listed: Sequence[UtteranceEntry]
    changes: AugmentConfig = field(default_factory=AugmentConfig)
    folder: Path = Path()


@dataclass(frozen=True)
class Shard:
    """Utterances whose features share a file.

    Attributes:
        part: the part of a set that has them.
        number: number among the shards of the part.
        at: positions of the utterances in the part, in the order of the file.
        seconds: length of the speech, in part estimated from sizes of files.
    """

    part: Part
    number: int
    at: Sequence[int]
    seconds: float

    @property
    def entries(self) -> list[UtteranceEntry]:
        """The utterances, in the order of the file."""
        return [self.part.listed[i] for i in self.at]

    @functools.cached_property
    def file_name(self) -> str:
        """Name of the file; other utterances have another name."""
        utt_ids = "\n".join(one.utt_id for one in self.entries)
        return (f"{self.part.name}-{self.number:05d}-"
                f"{hashlib.sha256(utt_ids.encode()).hexdigest()[:8]}.safetensors")

    def to_json(self) -> dict[str, Any]:
        """Return the shard for another process; `of_json` reads it."""
        part = {"name": self.part.name, "changes": asdict(self.part.changes), "folder": str(self.part.folder),
                "listed": [data_dir.to_json(one) for one in self.entries]}
        return {"part": part, "number": self.number, "seconds": self.seconds}

    @classmethod
    def of_json(cls, tree: Mapping[str, Any]) -> Shard:
        """Return the shard; its part has no other utterances."""
        part = tree["part"]
        listed = [data_dir.of_json(one) for one in part["listed"]]
        own = Part(part["name"], listed, AugmentConfig(**part["changes"]), Path(part["folder"]))
        return cls(own, tree["number"], tuple(range(len(listed))), tree["seconds"])


def shards(part: Part, config: FeatureConfig) -> list[Shard]:
    """Divide a part into shards; the same data give the same shards.

    Utterances are sorted by recording and time, so that one recording at a time is open.
    """
    found: list[Shard] = []
    group, length_s = array("q"), 0.0
    for i in _order(part.listed):
        group.append(i)
        length_s += _seconds(part.listed[i], config.sample_rate_hz)
        if length_s >= SHARD_S:
            found.append(Shard(part, len(found), group, length_s))
            group, length_s = array("q"), 0.0
    return [*found, Shard(part, len(found), group, length_s)] if group else found


def _order(listed: Sequence[UtteranceEntry]) -> Iterable[int]:
    """Sort utterances by recording and time; a few bytes of memory for each."""
    number_of: dict[str, int] = {}
    recordings, starts = array("q"), array("d")
    for one in listed:
        if isinstance(one.content, Piece):
            recording, start = str(one.content.path), one.content.start_s
        else:
            recording, _, offset = one.content.value.partition(":")
            digits = offset.partition("[")[0]
            start = float(digits) if digits.isdecimal() else 0.0
        recordings.append(number_of.setdefault(recording, len(number_of)))
        starts.append(start)
    names = list(number_of)
    rank = np.empty(len(names), np.int64)
    rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    # utterances with equal keys stay in the order of the set
    return map(int, np.lexsort((np.array(starts), rank[np.array(recordings, np.int64)])))


def _seconds(one: UtteranceEntry, sample_rate_hz: int) -> float:
    """Length of an utterance; that of a complete file is estimated from its size."""
    if not isinstance(one.content, Piece):
        return _GIVEN_S
    if one.content.end_s is not None:
        return one.content.end_s - one.content.start_s
    try:
        return one.content.path.stat().st_size / (2 * sample_rate_hz)
    except OSError:
        # reported when it is read
        return 0.0
