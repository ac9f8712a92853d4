"""The sets of a corpus from their shards: normalized, in the order of the data, memory-mapped.

The results are bitwise those of `ngsgd.asr.speech_set.assemble`, which has all features in memory.
Sums over many utterances are computed frame by frame in the same order, in several passes over the
files.

Letters: U utterances, copies included, T frames, D feature dimension.
"""

from __future__ import annotations

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
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError

# memory-mapped at once: each has a file descriptor and its pages
_OPEN_SHARDS = 4

Features = npt.NDArray[np.float32]
# number of an utterance and its features -> normalized features
Normalize = Callable[[int, Features], Features]


@dataclass(frozen=True)
class Position:
    """Place of an utterance: its number in a shard."""

    path: Path
    u: int


@dataclass(frozen=True)
class ShardedSet:
    """The utterances of a set in shards, in the order of the data; copies follow each other."""

    positions: Sequence[Position]
    utt_ids: tuple[str, ...]
    speakers: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]
    offsets: npt.NDArray[np.int64]
    dim: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of frames and of features."""
        return int(self.offsets[-1]), self.dim

    def features(self) -> Iterator[Features]:
        """Yield the features of each utterance, not normalized."""
        opened = lru_cache(_OPEN_SHARDS)(ShardFile)
        for one in self.positions:
            yield opened(one.path).features(one.u)

    def units(self, names: Sequence[str]) -> CmvnStats:
        """Add the statistics of the utterances, grouped by the names of their units."""
        opened = lru_cache(_OPEN_SHARDS)(ShardFile)
        stats: dict[str, cmvn.Stats] = {}
        for one, name in zip(self.positions, names, strict=True):
            found = opened(one.path).stats(one.u)
            stats[name] = stats[name] + found if name in stats else found
        return CmvnStats(stats, tuple(names))


def read(parts: Sequence[tuple[Part, Sequence[Shard]]], folder: Path) -> ShardedSet:
    """Find the utterances of a set in the shards of its parts.

    Raises:
        DataError: the shards have different numbers of features.
        OSError: a shard cannot be read.
    """
    found: list[tuple[Position, str, str, tuple[str, ...], int]] = []
    dims: dict[int, Path] = {}
    for part, shards in parts:
        of_entry: list[list[tuple[Position, str, str, tuple[str, ...], int]]] = [[] for _ in part.listed]
        for shard in shards:
            path = folder / shard.file_name
            file = ShardFile(path)
            dims.setdefault(file.dim, path)
            copies = len(file.utt_ids) // len(shard.at)
            lengths = np.diff(file.offsets).tolist()
            for u, (utt_id, speaker) in enumerate(zip(file.utt_ids, file.speakers, strict=True)):
                entry = shard.at[u // copies]
                of_entry[entry].append((Position(path, u), utt_id, speaker,
                                        part.listed[entry].words, lengths[u]))
        found += [one for group in of_entry for one in group]
    if len(dims) > 1:
        raise DataError(f"the utterances have {' or '.join(map(str, sorted(dims)))} features per "
                        "frame; use features of one kind.")
    positions, utt_ids, speakers, texts, num_frames = zip(*found, strict=True)
    return ShardedSet(positions, utt_ids, speakers, texts,
                      np.cumsum([0, *num_frames], dtype=np.int64), *dims)


def assemble(name: str, found: ShardedSet, config: FeatureConfig, folder: Path, *,
             given: CmvnStats | None = None, all_speech: cmvn.Stats | None = None) -> SpeechSet:
    """Normalize a set into files of a folder.

    Args:
        name: name of the set, and of its files.
        found: the utterances.
        config: the section `features`.
        folder: folder of the files.
        given: statistics of features.cmvn=given.
        all_speech: statistics of the training set, for features.cmvn=online. Default: those of
            this set.
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
        normal = _by_utterance(found, config) if is_own else _by_speaker(found)
    elif given:
        normal = (cmvn.normalized(raw, given.stats[unit])
                  for raw, unit in zip(found.features(), given.unit_of, strict=True))
    else:
        normal = found.features()
    features_TD = mapped.write_rows(folder / f"{name}.features_TD.npy", found.shape, normal)
    frames = FrameSet(features_TD, unaligned(len(features_TD)), found.offsets, found.utt_ids)
    return SpeechSet(frames, found.texts, found.speakers, units, raw_TD)


def _by_utterance(found: ShardedSet, config: FeatureConfig) -> Iterator[Features]:
    for raw, speaker in zip(found.features(), found.speakers, strict=True):
        yield from filterbank.normalize([raw], [speaker], config)


def _by_speaker(found: ShardedSet) -> Iterator[Features]:
    """Normalize to zero mean and unit variance per speaker; three passes over the shards."""
    place = {speaker: s for s, speaker in enumerate(dict.fromkeys(found.speakers))}
    speaker_U = [place[speaker] for speaker in found.speakers]
    count_S1 = np.zeros((len(place), 1))
    sum_SD, square_SD = np.zeros((2, len(place), found.dim))
    for s, raw in zip(speaker_U, found.features(), strict=True):
        count_S1[s] += len(raw)
        sum_SD[s] = cmvn.added(sum_SD[s], raw)
    mean_SD = sum_SD / count_S1
    for s, raw in zip(speaker_U, found.features(), strict=True):
        square_SD[s] = cmvn.added(square_SD[s], np.square(raw - mean_SD[s]))
    deviation_SD = np.maximum(np.sqrt(square_SD / count_S1), cmvn.SMALLEST_DEVIATION)
    shift_SD, scale_SD = mean_SD.astype(np.float32), deviation_SD.astype(np.float32)
    for s, raw in zip(speaker_U, found.features(), strict=True):
        yield (raw - shift_SD[s]) / scale_SD[s]
