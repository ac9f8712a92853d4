"""The features of a shard in one file, with its digest in another.

    NAME.safetensors    features   T x D          float32, not normalized
                        offsets    U + 1          int64, first row of each utterance
                        stats      U x 2 x (D+1)  float64, sums for the normalization
                        names      bytes of JSON  [names, speakers] of the utterances
    NAME.sha256         SHA-256 of the file
    NAME.lock           locked while a process computes the shard

A file has its final name only when it is complete. A file without a digest, or with another one, is
computed again.

Letters: U utterances, copies included, T frames, D feature dimension.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd import files, shared_work
from ngsgd.asr import speech_set
from ngsgd.asr.corpora import data_dir
from ngsgd.asr.corpora.shards.plan import Shard
from ngsgd.asr.features import augment, cmvn
from ngsgd.asr.features.audio import Reader
from ngsgd.asr.utterance import FramedUtterance
from ngsgd.config import FeatureConfig
from ngsgd.data.storage import ArrayFile, FormatError, write_arrays


def compute(shard: Shard, config: FeatureConfig, folder: Path, reader: Reader) -> bool:
    """Compute the features of a shard, unless they exist; `reader` keeps the last recording open.

    Returns:
        False if another process computes this shard at the moment.

    Raises:
        DataError: audio or features are missing, damaged or inconsistent.
        OSError: the disk is full.
    """
    path = folder / shard.file_name
    with shared_work.lock(path.with_suffix(shared_work.LOCK)) as is_mine:
        if is_mine and not is_complete(path):
            part = shard.part
            if config.kind == "given":
                framed = list(data_dir.given(shard.entries, part.folder))
            else:
                said = augment.for_set("train", data_dir.spoken(shard.entries, config, reader), part.changes,
                                       sample_rate_hz=config.sample_rate_hz, is_checked=True)
                framed = [speech_set.frame(one, config) for one in said]
            _write(path, framed)
        return is_mine


def is_complete(path: Path) -> bool:
    """Whether the file exists and matches its digest."""
    return path.is_file() and path.with_suffix(".sha256").is_file() and files.matches_digest(path)


def _write(path: Path, framed: Sequence[FramedUtterance]) -> None:
    dim = framed[0].features_TD.shape[1]
    offsets = np.cumsum([0, *(len(one.features_TD) for one in framed)], dtype=np.int64)
    stats = np.array([cmvn.statistics(one.features_TD) for one in framed])
    names = json.dumps([[one.utt_id for one in framed], [one.speaker for one in framed]])
    # a digest of an earlier file would be wrong for a moment
    path.with_suffix(".sha256").unlink(missing_ok=True)
    with files.new_file(path) as temporary:
        digest = write_arrays(temporary, "features", (int(offsets[-1]), dim),
                              (one.features_TD for one in framed),
                              {"offsets": offsets, "stats": stats,
                               "names": np.frombuffer(names.encode(), np.uint8)})
    files.keep_digest(path, digest)


class ShardFile:
    """A shard on disk, memory-mapped.

    Attributes:
        utt_ids: names of the utterances, copies included.
        speakers: their speakers.
        offsets: first row of each, and the number of rows.
        dim: number of features.
    """

    def __init__(self, path: Path) -> None:
        """Map a file; raise OSError if it cannot be read."""
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
