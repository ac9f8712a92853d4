"""Archives of whole sequences, or of chunks of them, with the order of reading that (seed, outer iteration, job) decides.

They stand beside the archives of single frames: the same frames and labels, cut another way.  A sequence whose labels have no
path through the denominator graph is left out, and counted.

Letters: Q sequences, N rows, D feature dimension, W window of spliced frames.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.config import AugmentConfig
from ngsgd.data.examples import windows
from ngsgd.data.frames import FrameSet
from ngsgd.data.prefetch import ahead
from ngsgd.data.reader import EgsReader
from ngsgd.data.storage import ArrayFile, FormatError, write_arrays
from ngsgd.errors import DamagedArchiveError, DataError
from ngsgd.files import read_json, sealed, sha256, shared_directory, unsealed, write_text
from ngsgd.phase import Phase
from ngsgd.schedules import Shard
from ngsgd.sequence.graph import StateGraph

FORMAT_VERSION = 1
# frames around a chunk that are stored with it: the widest context there can be (egs.left_context)
_MARGIN = 100


class SequenceMinibatch(NamedTuple):
    """Whole sequences, their frames end to end, each spliced with its context."""

    x_ND: Tensor
    pdf_N: Tensor
    # always None: all frames weigh 1
    weight_N: Tensor | None
    # frames of each sequence
    lengths: tuple[int, ...]
    # float64: what the graph gives to the labels of each
    log_weight_B: Tensor


@dataclass(frozen=True)
class SequenceIndex:
    """What the archives of one directory hold; kept in its sequences.json."""

    format_version: int
    num_frames: list[int]       # of each archive
    num_sequences: list[int]    # likewise
    # their labels have no path through the graph
    num_left_out: int
    sha256: list[str]           # of each archive


def prepare_sequences(train: FrameSet, graph: StateGraph, *, samples_per_iter: int, chunk_frames: int, digest: str,
                      cache_root: Path, report: Callable[[str], None] = print) -> Path:
    """The directory of these sequences, written if it is not there yet; `digest` stands for the content of the frames.

    With `chunk_frames`, utterances are cut into chunks of about that length, whose labels may begin and end anywhere in the
    graph.  A directory whose index is damaged is written again, which `report` is given as a line.  Raises DataError for a
    full disk, and when no sequence is left.
    """
    content = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in graph.arrays().values())).hexdigest()
    key = json.dumps([FORMAT_VERSION, digest, content, samples_per_iter, chunk_frames])
    directory = cache_root / f"sequences-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not _is_there(directory, report):
        report(Phase("writing the archives of training sequences"))
        try:
            # shared_directory keeps a directory that has an index
            (directory / "sequences.json").unlink(missing_ok=True)
            with shared_directory(directory, "sequences.json") as temporary:
                _write(train, graph, samples_per_iter, chunk_frames, temporary)
        except OSError as error:
            raise DataError(f"archives of sequences could not be written under {cache_root} ({error.strerror or error}); make "
                            "room, or choose another place with data.cache_dir=PATH.") from error
    return directory


def _is_there(directory: Path, report: Callable[[str], None]) -> bool:
    if not os.path.lexists(directory / "sequences.json"):
        return False
    try:
        _read_index(directory)
    except FormatError as error:
        report(f"{directory} is damaged ({error}); preparing it again.")
        return False
    return True


def _read_index(directory: Path) -> SequenceIndex:
    """Raises FormatError for an index that is missing, damaged or of another format."""
    try:
        tree = read_json(directory / "sequences.json")
        if isinstance(tree, dict) and tree.get("format_version") != FORMAT_VERSION:
            raise FormatError(f"it holds sequences of format {tree.get('format_version')} and this is {FORMAT_VERSION}")
        content, has_digest = unsealed(tree)
        index = SequenceIndex(**content)
        if not has_digest and not len(index.num_frames) == len(index.num_sequences) == len(index.sha256):
            raise ValueError("its counts do not fit together")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"its sequences.json cannot be read: {error}") from error
    return index


class _Span(NamedTuple):
    """A sequence, as rows of the frame set."""

    first: int
    end: int
    # with its context, inside its utterance
    low: int
    high: int
    log_weight: float


def _write(train: FrameSet, graph: StateGraph, samples_per_iter: int, chunk_frames: int, directory: Path) -> None:
    spans = list(_spans(train, graph, chunk_frames))
    usable = [span for span in spans if math.isfinite(span.log_weight)]
    if not usable:
        raise DataError(f"the labels of all {len(spans)} training sequences have no path through the denominator graph; check that "
                        "graph and alignment belong together.")
    # on disk; every reading shuffles again with the run's seed
    order = np.random.default_rng(0).permutation(len(usable))
    num_archives = max(1, round(sum(span.end - span.first for span in usable) / samples_per_iter))
    entries = [_write_archive(train, [usable[at] for at in part], directory / _name(number))
               for number, part in enumerate(np.array_split(order, min(num_archives, len(usable))))]
    num_frames, num_sequences, digests = (list(column) for column in zip(*entries, strict=True))
    index = SequenceIndex(FORMAT_VERSION, num_frames, num_sequences, len(spans) - len(usable), digests)
    write_text(directory / "sequences.json", json.dumps(sealed(asdict(index)), indent=1))


def _spans(train: FrameSet, graph: StateGraph, chunk_frames: int) -> Iterator[_Span]:
    for low, high in zip(train.offsets[:-1].tolist(), train.offsets[1:].tolist(), strict=True):
        num_chunks = max(1, round((high - low) / chunk_frames)) if chunk_frames else 1
        edges = np.linspace(low, high, num_chunks + 1).round().astype(int).tolist()
        for first, end in itertools.pairwise(edges):
            if end > first:
                yield _Span(first, end, max(low, first - _MARGIN), min(high, end + _MARGIN),
                            graph.log_weight_of(train.pdf_T[first:end]))


def _write_archive(train: FrameSet, spans: list[_Span], path: Path) -> tuple[int, int, str]:
    """(frames, sequences, SHA-256)."""
    lengths = [span.high - span.low for span in spans]
    begins = np.cumsum([0, *lengths])
    pieces = (np.ascontiguousarray(train.features_TD[span.low:span.high], dtype=np.float32) for span in spans)
    table = {"begin": begins[:-1], "size": lengths, "first": [span.first - span.low for span in spans],
             "end": [span.end - span.low for span in spans]}
    rest: dict[str, npt.NDArray[Any]] = {name: np.array(column, np.int64) for name, column in table.items()}
    rest["pdf"] = np.concatenate([train.pdf_T[span.low:span.high] for span in spans]).astype(np.int32)
    rest["log_weight"] = np.array([span.log_weight for span in spans], np.float64)
    if train.side is not None:
        used_K, row_T = np.unique(np.concatenate([train.side.row_T[span.low:span.high] for span in spans]), return_inverse=True)
        rest |= {"side": np.ascontiguousarray(train.side.rows_RS[used_K]), "side_row": row_T.astype(np.int32)}
    digest = write_arrays(path, "features", (int(begins[-1]), train.dim), pieces, rest)
    return sum(span.end - span.first for span in spans), len(spans), digest


def _name(archive: int) -> str:
    return f"sequences.{archive:04d}.safetensors"


class SequenceReader:
    """Reads minibatches of sequences; has what a schedule asks of a reader of frames."""

    def __init__(self, directory: Path, frames: EgsReader) -> None:
        """`frames` are the examples of the same corpus, which say how frames are spliced."""
        self.directory = directory
        try:
            self.index = _read_index(directory)
        except FormatError as error:
            raise DataError(f"{directory} is not a directory of sequences ({error}); remove it and run again.") from error
        self.info = replace(frames.info, num_archives=len(self.index.num_frames), frames_per_eg=1,
                            num_frames=sum(self.index.num_frames), num_examples=list(self.index.num_sequences),
                            num_rows=[[number] for number in self.index.num_frames])

    def num_frames(self, shard: Shard) -> int:
        """Rows that the minibatches of `shard` hold in all."""
        return self.index.num_frames[shard.archive]

    def num_minibatches(self, shard: Shard, size: int) -> int:
        """Minibatches of about `size` frames that a pass over `shard` gives."""
        return min(self.index.num_sequences[shard.archive], max(1, round(self.num_frames(shard) / size)))

    def minibatches(self, shard: Shard, size: int, *, seed: int, outer_iter: int, job: int, first: int = 0,
                    stop: int | None = None, augment: AugmentConfig | None = None, prefetch: int = 0,
                    pin_memory: bool = False) -> Iterator[SequenceMinibatch]:
        """All sequences of an archive, shuffled, about `size` frames at a time; `augment` is not used.

        Minibatches `first` to `stop` of the pass; where it begins changes nothing in what follows.
        """
        archive = self._archive(shard.archive)
        order_Q = np.random.default_rng((seed, outer_iter, job)).permutation(self.index.num_sequences[shard.archive])
        parts = np.array_split(order_Q, self.num_minibatches(shard, size))[first:stop]

        def made() -> Iterator[SequenceMinibatch]:
            for part in parts:
                minibatch = self._minibatch(archive, part.tolist())
                yield minibatch._replace(x_ND=minibatch.x_ND.pin_memory()) if pin_memory else minibatch
        return ahead(made(), prefetch)

    def _minibatch(self, archive: ArrayFile, chosen: list[int]) -> SequenceMinibatch:
        rows, pdfs, at_N = [], [], []
        for at in chosen:
            begin, size = archive["begin"][at], archive["size"][at]
            time_T = np.arange(archive["first"][at], archive["end"][at])
            rows.append(begin + np.clip(time_T[:, None] + self._window, 0, size - 1))
            pdfs.append(archive["pdf"][begin + time_T].astype(np.int64))
            at_N.append(begin + time_T)
        row_NW = np.concatenate(rows)
        x_ND = torch.from_numpy(windows(archive["features"], row_NW).reshape(len(row_NW), -1))
        if self.info.side_dim:
            x_ND = torch.cat([x_ND, torch.from_numpy(archive["side"][archive["side_row"][np.concatenate(at_N)]])], dim=1)
        return SequenceMinibatch(x_ND, torch.from_numpy(np.concatenate(pdfs)), None, tuple(map(len, pdfs)),
                                 torch.from_numpy(archive["log_weight"][chosen]))

    @cached_property
    def _window(self) -> npt.NDArray[np.int64]:
        return np.arange(-self.info.left_context, self.info.right_context + 1)

    def _archive(self, archive: int) -> ArrayFile:
        path = self.directory / _name(archive)
        if archive not in self._open:
            try:
                if sha256(path) != self.index.sha256[archive]:
                    raise FormatError("it does not match its checksum")
                self._open[archive] = ArrayFile(path)
            except (FormatError, OSError) as error:
                raise DamagedArchiveError(f"{path} cannot be read ({error}); remove {self.directory} and run again.",
                                          archive) from error
        return self._open[archive]

    @cached_property
    def _open(self) -> dict[int, ArrayFile]:
        return {}
