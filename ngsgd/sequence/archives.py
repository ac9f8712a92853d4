"""Archives of complete sequences or chunks, read in an order given by (seed, outer iteration, job).

They lie next to the archives of single frames. Sequences without a path through the denominator
graph are excluded and counted. Q sequences, N rows, D feature dimension, W window of spliced
frames.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.config import AugmentConfig
from ngsgd.data.archives import prepared
from ngsgd.data.examples import windows
from ngsgd.data.fetching.files import Files, LocalFiles, Offer, offer_of
from ngsgd.data.frames import FrameSet
from ngsgd.data.reader import EgsReader, ahead, index_in, opened
from ngsgd.data.storage import ArrayFile, FormatError, write_arrays
from ngsgd.errors import DataError
from ngsgd.files import FORMATS, cache_name, read_json, sealed, unsealed, write_text
from ngsgd.schedules import Shard
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.objectives import Chain, Chains, chain_of

INDEX = "sequences.json"
_CHAIN = ("pdf", "enter", "loop", "first", "last")  # names of the fields of a chain in an archive
# Stored frames around a chunk: the largest possible context (egs.left_context).
_MARGIN = 100


class Outputs(NamedTuple):
    """The frames for which there are outputs, and their labels."""

    frame_subsampling: int = 1  # frames per output; archives have all offsets
    tolerance_frames: int = 0  # frames by which states may move from their labels

    @property
    def has_chains(self) -> bool:
        """Whether numerators are sums over several paths."""
        return self.tolerance_frames > 0


class SequenceMinibatch(NamedTuple):
    """Complete sequences, concatenated, each spliced with its context."""

    x_ND: Tensor
    pdf_N: Tensor
    weight_N: Tensor | None  # always None: all frames have weight 1
    lengths: tuple[int, ...]  # frames of each sequence
    # float64: log weight of the labels of each sequence in the graph, or of the end of its chain
    log_weight_B: Tensor
    chains: Chains | None = None  # numerators with tolerance


@dataclass(frozen=True)
class SequenceIndex:
    """Contents of the archives of one directory, stored in its sequences.json."""

    num_frames: list[int]  # of each archive
    num_sequences: list[int]  # of each archive
    num_left_out: int  # sequences whose labels have no path through the graph
    sha256: list[str]  # of each archive


def prepare_sequences(train: FrameSet, graph: StateGraph, *, samples_per_iter: int, chunk_frames: int, digest: str,
                      cache_root: Path, outputs: Outputs | None = None, report: Callable[[str], None] = print) -> Path:
    """Write the directory of these sequences unless it exists, and return it.

    Archives have about `samples_per_iter` frames, and chunks about `chunk_frames` (0: complete
    utterances), whose labels may begin and end anywhere in the graph. `outputs` are the frames that
    have outputs, and the tolerance of their labels (default: all, none). `report` is called if a
    damaged directory is written again. Raises DataError: disk full, or no usable sequence.
    """
    content = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in graph.arrays().values())).hexdigest()
    outputs = outputs or Outputs()
    directory = cache_root / cache_name("sequences", version=FORMATS["sequences"], corpus=digest, graph=content,
                                        samples_per_iter=samples_per_iter, chunk_frames=chunk_frames, outputs=list(outputs))

    def write(temporary: Path) -> None:
        groups = list(_groups(train, graph, chunk_frames, outputs))
        num_spans = sum(len(group.spans) for group in groups)
        groups = [group._replace(spans=[span for span in group.spans if math.isfinite(span.log_weight)]) for group in groups]
        usable = [group for group in groups if group.spans]
        if not usable:
            raise DataError(f"the labels of all {num_spans} training sequences have no path "
                            "through the denominator graph; check that graph and alignment belong together.")
        # On disk; every pass shuffles again with the seed of the run.
        order = np.random.default_rng(0).permutation(len(usable))
        num_outputs = sum(span.num_outputs for group in usable for span in group.spans)
        num_archives = max(1, round(num_outputs / samples_per_iter))
        split = np.array_split(order, min(num_archives, len(usable)))
        entries = [_write_archive(train, [usable[at] for at in part], temporary / _name(number))
                   for number, part in enumerate(split)]
        num_frames, num_sequences, digests = (list(column) for column in zip(*entries, strict=True))
        index = SequenceIndex(num_frames, num_sequences, num_spans - sum(num_sequences), digests)
        write_text(temporary / INDEX, json.dumps(sealed("sequences", asdict(index)), indent=1))
    return prepared(directory / INDEX, "archives of training sequences", read_index_file, write, report)


def read_index_file(path: Path) -> SequenceIndex:
    """Read the index; raises FormatError if it is missing, damaged or of another format."""
    try:
        return SequenceIndex(**unsealed("sequences", read_json(path)))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"its sequences.json cannot be read: {error}") from error


class _Span(NamedTuple):
    """A sequence, as rows of the frame set."""

    first: int
    end: int
    step: int  # frames per output
    log_weight: float
    chain: Chain | None

    @property
    def num_outputs(self) -> int:
        return -(-(self.end - self.first) // self.step)


class _Group(NamedTuple):
    """The sequences of a chunk, one for each offset of its outputs, and their stored frames."""

    spans: list[_Span]
    low: int  # with the context, inside the utterance
    high: int


def _groups(train: FrameSet, graph: StateGraph, chunk_frames: int, outputs: Outputs) -> Iterator[_Group]:
    step = outputs.frame_subsampling
    for low, high in zip(train.offsets[:-1].tolist(), train.offsets[1:].tolist(), strict=True):
        num_chunks = max(1, round((high - low) / chunk_frames)) if chunk_frames else 1
        edges = np.linspace(low, high, num_chunks + 1).round().astype(int).tolist()
        for begin, end in itertools.pairwise(edges):
            spans, chain = [], None
            for first in range(begin, min(end, begin + step)):
                pdf_T = train.pdf_T[first:end:step]
                if outputs.has_chains:
                    chain, log_weight = chain_of(graph, pdf_T, math.ceil(outputs.tolerance_frames / step))
                else:
                    log_weight = graph.log_weight_of(pdf_T)
                spans.append(_Span(first, end, step, log_weight, chain))
            if spans:
                yield _Group(spans, max(low, begin - _MARGIN), min(high, end + _MARGIN))


def _write_archive(train: FrameSet, groups: list[_Group], path: Path) -> tuple[int, int, str]:
    """Write an archive; return (outputs, sequences, SHA-256)."""
    lengths = [group.high - group.low for group in groups]
    begins = np.cumsum([0, *lengths])
    pieces = (np.ascontiguousarray(train.features_TD[group.low:group.high], dtype=np.float32) for group in groups)
    placed = [(begin, group, span) for begin, group in zip(begins.tolist(), groups, strict=False) for span in group.spans]
    table = {"begin": [begin for begin, _, _ in placed], "size": [group.high - group.low for _, group, _ in placed],
             "first": [span.first - group.low for _, group, span in placed],
             "end": [span.end - group.low for _, group, span in placed]}
    spans = [span for _, _, span in placed]
    if spans[0].step > 1:
        table["step"] = [span.step for span in spans]
    rest: dict[str, npt.NDArray[Any]] = {name: np.array(column, np.int64) for name, column in table.items()}
    rest["pdf"] = np.concatenate([train.pdf_T[group.low:group.high] for group in groups]).astype(np.int32)
    rest["log_weight"] = np.array([span.log_weight for span in spans], np.float64)
    if chains := [span.chain for span in spans if span.chain]:
        # end to end
        rest |= {f"chain_{name}": np.concatenate(parts) for name, parts in zip(_CHAIN, zip(*chains, strict=True), strict=True)}
        rest["chain_begin"] = np.cumsum([0, *(len(chain.pdf_K) for chain in chains)])
    if train.side is not None:
        used_K, row_T = np.unique(np.concatenate([train.side.row_T[group.low:group.high] for group in groups]), return_inverse=True)
        rest |= {"side": np.ascontiguousarray(train.side.rows_RS[used_K]), "side_row": row_T.astype(np.int32)}
    digest = write_arrays(path, "features", (int(begins[-1]), train.dim), pieces, rest)
    return sum(span.num_outputs for span in spans), len(spans), digest


def _name(archive: int) -> str:
    return f"sequences.{archive:04d}.safetensors"


class SequenceReader:
    """Reader of minibatches of sequences, with the interface that schedules need."""

    def __init__(self, directory: Path, frames: EgsReader, files: Files | None = None) -> None:
        """Open a result of `prepare_sequences`; `frames` are examples of the same corpus, and
        `files` those of the directory on a node that does not see it.
        """
        self.directory = directory
        self.files = files or LocalFiles(directory)
        self.index = index_in(directory, self.files, INDEX, "sequences", read_index_file)
        self.info = replace(frames.info, num_archives=len(self.index.num_frames), frames_per_eg=1,
                            num_frames=sum(self.index.num_frames), num_examples=list(self.index.num_sequences),
                            num_rows=[[number] for number in self.index.num_frames])

    def num_frames(self, shard: Shard) -> int:
        """Return the number of rows in the minibatches of `shard`."""
        return self.index.num_frames[shard.archive]

    def num_minibatches(self, shard: Shard, size: int) -> int:
        """Return the number of minibatches of about `size` frames in a pass over `shard`."""
        return min(self.index.num_sequences[shard.archive], max(1, round(self.num_frames(shard) / size)))

    def minibatches(self, shard: Shard, size: int, *, seed: int, outer_iter: int, job: int, first: int = 0,
                    stop: int | None = None, augment: AugmentConfig | None = None, prefetch: int = 0,
                    pin_memory: bool = False) -> Iterator[SequenceMinibatch]:
        """Yield all sequences of an archive, shuffled, about `size` frames at a time, with `first`
        and `stop` only these of the pass; `augment` is not used.
        """
        archive = opened(self.files, self.directory, _name(shard.archive), str(self.index.sha256[shard.archive]), shard.archive)
        order_Q = np.random.default_rng((seed, outer_iter, job)).permutation(self.index.num_sequences[shard.archive])
        parts = np.array_split(order_Q, self.num_minibatches(shard, size))[first:stop]

        def made() -> Iterator[SequenceMinibatch]:
            for part in parts:
                minibatch = self._minibatch(archive, part.tolist())
                yield minibatch._replace(x_ND=minibatch.x_ND.pin_memory()) if pin_memory else minibatch
        return ahead(made(), prefetch)

    def _minibatch(self, archive: ArrayFile, chosen: list[int]) -> SequenceMinibatch:
        rows, pdfs, at_N = [], [], []
        step_Q, window_W = archive.get("step"), np.arange(-self.info.left_context, self.info.right_context + 1)
        for at in chosen:
            begin, size = archive["begin"][at], archive["size"][at]
            time_T = np.arange(archive["first"][at], archive["end"][at], 1 if step_Q is None else step_Q[at])
            rows.append(begin + np.clip(time_T[:, None] + window_W, 0, size - 1))
            pdfs.append(archive["pdf"][begin + time_T].astype(np.int64))
            at_N.append(begin + time_T)
        row_NW = np.concatenate(rows)
        x_ND = torch.from_numpy(windows(archive["features"], row_NW).reshape(len(row_NW), -1))
        if self.info.side_dim:
            x_ND = torch.cat([x_ND, torch.from_numpy(archive["side"][archive["side_row"][np.concatenate(at_N)]])], dim=1)
        chains, begin_Q = None, archive.get("chain_begin")
        if begin_Q is not None:
            columns = [archive[f"chain_{name}"] for name in _CHAIN]
            chains = Chains.of([Chain(*(column[begin_Q[at]:begin_Q[at + 1]] for column in columns)) for at in chosen])
        return SequenceMinibatch(x_ND, torch.from_numpy(np.concatenate(pdfs)), None, tuple(map(len, pdfs)),
                                 torch.from_numpy(archive["log_weight"][chosen]), chains)

    def offer(self) -> Offer:
        """Describe the directory to nodes that do not see it."""
        return offer_of(self.directory, [INDEX], {_name(number): digest for number, digest in enumerate(self.index.sha256)})

    def prefetch(self, archives: Sequence[int]) -> None:
        """Fetch archives in the background, on a node that does not see the directory."""
        self.files.prefetch([str(self.index.sha256[archive]) for archive in archives])
