"""Shards of a set: about ten minutes of speech each, in the order of recordings; sets from shards.

    NAME.safetensors    features   T x D          float32, not normalized
                        offsets    U + 1          int64, first row of each utterance
                        stats      U x 2 x (D+1)  float64, sums for the normalization
                        names      bytes of JSON  [names, speakers] of the utterances
    NAME.sha256         SHA-256 of the file; without it, or with another, it is computed again
    NAME.lock           locked while a process computes the shard

Sets are memory-mapped, and bitwise those of `ngsgd.asr.speech_set.assemble`: sums are computed
frame by frame in the same order. U utterances, copies included, T frames, D feature dimension.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files, shared_work
from ngsgd.asr import speech_set
from ngsgd.asr.corpora import data_dir
from ngsgd.asr.features import augment, cmvn, filterbank
from ngsgd.asr.features.audio import Piece, Reader
from ngsgd.asr.features.cmvn import CmvnStats
from ngsgd.asr.utterance import unaligned
from ngsgd.config import AugmentConfig, FeatureConfig
from ngsgd.data import mapped
from ngsgd.data.columns import Strings, WordLists
from ngsgd.data.frames import FrameSet
from ngsgd.data.storage import ArrayFile, FormatError, write_arrays
from ngsgd.errors import DataError
from ngsgd.phase import Each

SHARD_S = 600.0
_GIVEN_S = 10.0  # assumed length of an utterance whose features are given
# memory-mapped at once: each has a file descriptor and its pages
_OPEN_SHARDS = 4

Features = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Utterances of a set that are changed alike, in the order of the set."""

    name: str  # unique, such as "train" or "train-added"
    listed: Sequence[data_dir.UtteranceEntry]
    changes: AugmentConfig = field(default_factory=AugmentConfig)
    folder: Path = Path()  # of given features


@dataclass(frozen=True)
class Shard:
    """Utterances whose features share a file."""

    part: Part
    number: int  # among the shards of the part
    at: Sequence[int]  # positions of the utterances in the part, in the order of the file
    seconds: float  # length of the speech, in part estimated from sizes of files

    @property
    def entries(self) -> list[data_dir.UtteranceEntry]:
        """The utterances, in the order of the file."""
        return [self.part.listed[i] for i in self.at]

    @functools.cached_property
    def file_name(self) -> str:
        """Name of the file; other utterances have another name."""
        utt_ids = "\n".join(one.utt_id for one in self.entries)
        return f"{self.part.name}-{self.number:05d}-{hashlib.sha256(utt_ids.encode()).hexdigest()[:8]}.safetensors"

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


def divided(part: Part, config: FeatureConfig) -> list[Shard]:
    """Divide a part into shards, sorted by recording and time, so that one recording is open."""
    found: list[Shard] = []
    group, length_s = array("q"), 0.0
    for i in _order(part.listed):
        group.append(i)
        length_s += _seconds(part.listed[i], config.sample_rate_hz)
        if length_s >= SHARD_S:
            found.append(Shard(part, len(found), group, length_s))
            group, length_s = array("q"), 0.0
    return [*found, Shard(part, len(found), group, length_s)] if group else found


def _order(listed: Sequence[data_dir.UtteranceEntry]) -> Iterable[int]:
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


def _seconds(one: data_dir.UtteranceEntry, sample_rate_hz: int) -> float:
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


def compute(shard: Shard, config: FeatureConfig, folder: Path, reader: Reader, each: Each) -> bool:
    """Compute the features of a shard, unless they exist; `reader` keeps the last recording open,
    and `each` yields utterances. Returns False if another process computes it. Raises DataError for
    damaged data, OSError if the disk is full.
    """
    path = folder / shard.file_name
    with shared_work.lock(path.with_suffix(shared_work.LOCK)) as is_mine:
        if is_mine and not is_complete(path):
            part = shard.part
            if config.kind == "given":
                framed = list(each(data_dir.given(shard.entries, part.folder)))
            else:
                said = augment.for_set("train", data_dir.spoken(shard.entries, config, reader), part.changes,
                                       sample_rate_hz=config.sample_rate_hz, is_checked=True)
                framed = [speech_set.frame(one, config) for one in each(said)]
            offsets = np.cumsum([0, *(len(one.features_TD) for one in framed)], dtype=np.int64)
            stats = np.array([cmvn.statistics(one.features_TD) for one in framed])
            names = json.dumps([[one.utt_id for one in framed], [one.speaker for one in framed]])
            # a digest of an earlier file would be wrong for a moment
            path.with_suffix(".sha256").unlink(missing_ok=True)
            with files.new_file(path) as temporary:
                digest = write_arrays(
                    temporary, "features", (int(offsets[-1]), framed[0].features_TD.shape[1]),
                    (one.features_TD for one in framed), {"offsets": offsets, "stats": stats,
                     "names": np.frombuffer(names.encode(), np.uint8)})
            files.keep_digest(path, digest)
        return is_mine


def is_complete(path: Path) -> bool:
    """Whether the file exists and matches its digest."""
    return path.is_file() and path.with_suffix(".sha256").is_file() and files.matches_digest(path)


class ShardFile:
    """A shard on disk, memory-mapped; OSError if it cannot be read. `offsets` are the first row of
    each utterance and the number of rows, `dim` is that of features.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = ArrayFile(path)
            utt_ids, speakers = json.loads(self._file["names"].tobytes())
        except (FormatError, ValueError, KeyError) as error:
            raise OSError(0, f"damaged: {error}", str(path)) from error
        self.utt_ids: list[str] = utt_ids
        self.speakers: list[str] = speakers
        self.offsets: npt.NDArray[np.int64] = np.array(self._file["offsets"])
        self.dim = int(self._file["features"].shape[1])

    def features(self, u: int) -> npt.NDArray[np.float32]:
        """Return a copy of the T x D features of an utterance."""
        return np.array(self._file["features"][self.offsets[u]:self.offsets[u + 1]])

    def stats(self, u: int) -> cmvn.Stats:
        """Return a copy of the statistics of an utterance."""
        return np.array(self._file["stats"][u])


@dataclass(frozen=True)
class ShardedSet:
    """The utterances of a set in shards, in the order of the data; copies follow each other."""

    paths: Sequence[Path]
    shard_U: npt.NDArray[np.int32]  # number of the shard of each utterance
    place_U: npt.NDArray[np.int32]  # number of each utterance in its shard
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
    opened = functools.lru_cache(_OPEN_SHARDS)(lambda number: ShardFile(paths[number]))
    for number, u in zip(shard_U, place_U, strict=True):
        yield opened(int(number)), int(u)


def read(parts: Sequence[tuple[Part, Sequence[Shard]]], folder: Path) -> ShardedSet:
    """Find the utterances of a set in the shards of its parts. Raises DataError if the shards have
    different numbers of features. Raises OSError if a shard cannot be read.
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
    return ShardedSet(paths, shard_U, place_U, Strings(file.utt_ids[u] for file, u in _opened(paths, shard_U, place_U)),
                      Strings(file.speakers[u] for file, u in _opened(paths, shard_U, place_U)),
                      # the words of each utterance as often as it has copies
                      WordLists(one.words for one, number in zip(
                          itertools.chain.from_iterable(part.listed for part, _ in parts),
                          np.bincount(entry_U, minlength=begin).tolist(), strict=True) for _ in range(number)),
                      np.concatenate([[0], np.cumsum(length_U[order_U])]), *dims)


def assemble(name: str, found: ShardedSet, config: FeatureConfig, folder: Path, *,
             given: CmvnStats | None = None, all_speech: cmvn.Stats | None = None) -> speech_set.SpeechSet:
    """Normalize a set into files of a folder. `given` are the statistics of features.cmvn=given,
    `all_speech` those of training for features.cmvn=online (default: of this set).
    """
    units, raw_TD = given or CmvnStats({}, ()), None
    if config.cmvn == "online":
        raw_TD = mapped.write_rows(folder / f"{name}.raw_TD.npy", found.shape, found.features())
        all_speech = cmvn.statistics(raw_TD) if all_speech is None else all_speech
        units = CmvnStats({cmvn.GLOBAL: all_speech}, (cmvn.GLOBAL,) * len(found.utt_ids))
        normal = speech_set.online_normalized(found.features(), found.speakers, all_speech)
    elif config.cmvn in ("utterance", "speaker"):
        is_own = config.cmvn == "utterance"
        units = found.units(found.utt_ids if is_own else found.speakers)
        normal = cmvn.by_unit(found.features, found.speakers, found.dim) if not is_own else (
            one for raw in found.features() for one in filterbank.normalize([raw], [""], config))
    elif given:
        normal = (cmvn.normalized(raw, given.stats[unit]) for raw, unit in zip(found.features(), given.unit_of, strict=True))
    else:
        normal = found.features()
    features_TD = mapped.write_rows(folder / f"{name}.features_TD.npy", found.shape, normal)
    pdf_T = mapped.write_array(folder / f"{name}.pdf_T.npy", found.shape[:1],
                               map(unaligned, np.diff(found.offsets).tolist()), np.dtype(np.int32))
    frames = FrameSet(features_TD, pdf_T, found.offsets, found.utt_ids)
    return speech_set.SpeechSet(frames, found.texts, found.speakers, units, raw_TD)
