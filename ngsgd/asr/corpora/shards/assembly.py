"""The sets of a corpus from their shards: normalized, in the order of the data, memory-mapped.

The results are bitwise those of `ngsgd.asr.speech_set.assemble`, which has all features in memory.
Sums over many utterances are computed frame by frame in the same order, in several passes over the
files.

Letters: U utterances, copies included, T frames, D feature dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd.asr.corpora.shards.plan import Part, Shard
from ngsgd.asr.corpora.shards.shard_file import ShardFile
from ngsgd.asr.features import cmvn, filterbank
from ngsgd.asr.features.cmvn import CmvnStats
from ngsgd.asr.speech_set import SpeechSet, online_normalized
from ngsgd.asr.utterance import unaligned
from ngsgd.config import FeatureConfig
from ngsgd.data import mapped
from ngsgd.data.columns import Strings, WordLists
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError

# memory-mapped at once: each has a file descriptor and its pages
_OPEN_SHARDS = 4

Features = npt.NDArray[np.float32]
# number of an utterance and its features -> normalized features
Normalize = Callable[[int, Features], Features]


@dataclass(frozen=True)
class ShardedSet:
    """The utterances of a set in shards, in the order of the data; copies follow each other.

    Attributes:
        paths: the shards.
        shard_U: number of the shard of each utterance.
        place_U: number of each utterance in its shard.
    """

    paths: Sequence[Path]
    shard_U: npt.NDArray[np.int32]
    place_U: npt.NDArray[np.int32]
    utt_ids: Sequence[str]
    speakers: Sequence[str]
    texts: Sequence[tuple[str, ...]]
    offsets: npt.NDArray[np.int64]
    dim: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of frames and of features."""
        return int(self.offsets[-1]), self.dim

    def features(self) -> Iterator[Features]:
        """Yield the features of each utterance, not normalized."""
        return (file.features(u) for file, u in _opened(self.paths, self.shard_U, self.place_U))

    def units(self, names: Sequence[str]) -> CmvnStats:
        """Add the statistics of the utterances, grouped by the names of their units."""
        files = _opened(self.paths, self.shard_U, self.place_U)
        return cmvn.units((file.stats(u) for file, u in files), names)


def _opened(paths: Sequence[Path], shard_U: npt.NDArray[np.int32],
            place_U: npt.NDArray[np.int32]) -> Iterator[tuple[ShardFile, int]]:
    """Yield the shard of each utterance and its number there; few shards are open."""
    opened = lru_cache(_OPEN_SHARDS)(lambda number: ShardFile(paths[number]))
    for number, u in zip(shard_U, place_U, strict=True):
        yield opened(int(number)), int(u)


def read(parts: Sequence[tuple[Part, Sequence[Shard]]], folder: Path) -> ShardedSet:
    """Find the utterances of a set in the shards of its parts.

    Raises:
        DataError: the shards have different numbers of features.
        OSError: a shard cannot be read.
    """
    paths: list[Path] = []
    # number of the utterance in all parts, shard, number in the shard, number of frames
    found: list[npt.NDArray[np.int64]] = []
    dims: dict[int, Path] = {}
    begin = 0
    for part, shards in parts:
        for shard in shards:
            file = ShardFile(folder / shard.file_name)
            dims.setdefault(file.dim, folder / shard.file_name)
            num = len(file.utt_ids)
            entry_U = begin + np.repeat(np.asarray(shard.at, np.int64), num // len(shard.at))
            found.append(np.stack([entry_U, np.full(num, len(paths)), np.arange(num), np.diff(file.offsets)]))
            paths.append(folder / shard.file_name)
        begin += len(part.listed)
    if len(dims) > 1:
        raise DataError(f"the utterances have {' or '.join(map(str, sorted(dims)))} features per "
                        "frame; use features of one kind.")
    entry_U, shard_U, place_U, length_U = np.concatenate(found, axis=1)
    # copies of an utterance are in one shard and stay in their order
    order_U = np.argsort(entry_U, kind="stable")
    shard_U, place_U = shard_U[order_U].astype(np.int32), place_U[order_U].astype(np.int32)
    return ShardedSet(paths, shard_U, place_U,
                      Strings(file.utt_ids[u] for file, u in _opened(paths, shard_U, place_U)),
                      Strings(file.speakers[u] for file, u in _opened(paths, shard_U, place_U)),
                      # the words of each utterance as often as it has copies
                      WordLists(one.words for one, number in zip(
                          itertools.chain.from_iterable(part.listed for part, _ in parts),
                          np.bincount(entry_U, minlength=begin).tolist(), strict=True)
                          for _ in range(number)),
                      np.concatenate([[0], np.cumsum(length_U[order_U])]), *dims)


def assemble(name: str, found: ShardedSet, config: FeatureConfig, folder: Path, *,
             given: CmvnStats | None = None, all_speech: cmvn.Stats | None = None) -> SpeechSet:
    """Normalize a set into files of a folder, with names that begin with that of the set.

    `given` are the statistics of features.cmvn=given, and `all_speech` those of the training set
    for features.cmvn=online (default: of this set).
    """
    units, raw_TD = given or CmvnStats({}, ()), None
    if config.cmvn == "online":
        raw_TD = mapped.write_rows(folder / f"{name}.raw_TD.npy", found.shape, found.features())
        all_speech = cmvn.statistics(raw_TD) if all_speech is None else all_speech
        units = CmvnStats({cmvn.GLOBAL: all_speech}, (cmvn.GLOBAL,) * len(found.utt_ids))
        normal = online_normalized(found.features(), found.speakers, all_speech)
    elif config.cmvn in ("utterance", "speaker"):
        is_own = config.cmvn == "utterance"
        units = found.units(found.utt_ids if is_own else found.speakers)
        normal = cmvn.by_unit(found.features, found.speakers, found.dim) if not is_own else (
            one for raw in found.features() for one in filterbank.normalize([raw], [""], config))
    elif given:
        normal = (cmvn.normalized(raw, given.stats[unit])
                  for raw, unit in zip(found.features(), given.unit_of, strict=True))
    else:
        normal = found.features()
    features_TD = mapped.write_rows(folder / f"{name}.features_TD.npy", found.shape, normal)
    pdf_T = mapped.write_array(folder / f"{name}.pdf_T.npy", found.shape[:1],
                               map(unaligned, np.diff(found.offsets).tolist()), np.dtype(np.int32))
    frames = FrameSet(features_TD, pdf_T, found.offsets, found.utt_ids)
    return SpeechSet(frames, found.texts, found.speakers, units, raw_TD)
