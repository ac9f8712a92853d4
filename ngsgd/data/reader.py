"""Reader of minibatches from archives of examples, ordered by (seed, outer iteration, job).

Archives are memory-mapped, and a reader holds only a few minibatches for archives of any length.

Letters: E examples, F frames per example, W window of spliced frames, D feature dimension, N rows.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.config import AugmentConfig
from ngsgd.data.archives import INDEX, UTTERANCES, EgsInfo, archive_name, diagnostic_name, read_index_file
from ngsgd.data.examples import is_row
from ngsgd.data.fetching.files import Files, LocalFiles, Offer, offer_of
from ngsgd.data.fetching.source import UnsoundFileError
from ngsgd.data.storage import ArrayFile, FormatError
from ngsgd.errors import DamagedArchiveError, DataError
from ngsgd.files import read_json
from ngsgd.schedules import Shard

Item = TypeVar("Item")

# files next to the archives that the index does not list
BESIDE = "statistics-*.safetensors"
# separates the random numbers of masks from those of the order
_MASKS = 1
_PREFETCH = "ngsgd-prefetch"


class Minibatch(NamedTuple):
    """Spliced frames followed by their side rows, and the class of each frame."""

    x_ND: Tensor                    # float32
    pdf_N: Tensor                   # int64
    # float32, above 0: weight of each frame in the objf; None: all weights are 1
    weight_N: Tensor | None = None


@dataclass(frozen=True)
class Example:
    """Consecutive frames of one utterance with their context, as stored in an archive."""

    features_WD: npt.NDArray[np.float32]  # W = left context + F + right context
    pdf_F: npt.NDArray[np.int32]  # NO_FRAME after the end of the utterance
    weight_F: npt.NDArray[np.float32]
    utt_id: str
    group: str  # such as its speaker; empty if unknown
    side_FS: npt.NDArray[np.float32] | None = None  # side row of each frame


class EgsReader:
    """The archives of one directory.

    The checksum of each file is verified at its first use in a process. `files` gives them on a
    node that does not see the directory. Default: read in place.
    """

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        self.directory = directory
        self.files = files or LocalFiles(directory)
        self.info = index_in(directory, self.files, INDEX, "examples", read_index_file)

    def minibatches(self, shard: Shard, size: int, *, seed: int, outer_iter: int, job: int, first: int = 0,
                    stop: int | None = None, augment: AugmentConfig | None = None, prefetch: int = 0,
                    pin_memory: bool = False) -> Iterator[Minibatch]:
        """Yield one frame of every example of an archive, shuffled, in minibatches.

        Args:
            shard: archive, and position of the frame in its examples.
            size: rows of a minibatch; the last one may be smaller.
            seed, outer_iter, job: seed of the order.
            first: first minibatch of the pass to yield; the sequence is the same for any value.
            stop: end of the minibatches to yield; None for the end of the pass.
            augment: SpecAugment settings; None for no masks.
            prefetch: minibatches prepared in advance by a thread.
            pin_memory: use pinned memory, from which a GPU copies while it computes.

        Raises:
            DamagedArchiveError: the archive is damaged.
        """
        rows = _Rows(self.archive_arrays(shard.archive), shard.frame, self.info)
        random = np.random.default_rng((seed, outer_iter, job))
        order_N = rows.at_N[random.permutation(len(rows.at_N))]
        masks = augment if augment is not None and augment.spec else None
        rows.file.will_need()

        def made() -> Iterator[Minibatch]:
            for number, begin in list(enumerate(range(0, len(order_N), size)))[first:stop]:
                minibatch = rows.minibatch(order_N[begin:begin + size], pin_memory)
                if masks is not None:
                    drawn = np.random.default_rng((seed, outer_iter, job, number, _MASKS))
                    # side rows have no frames to mask
                    windows_ND = minibatch.x_ND[:, :self.info.num_spliced]
                    mask_windows(windows_ND, rows.width, drawn, out=windows_ND)
                yield minibatch
        return ahead(made(), prefetch)

    def utterances_of_pass(self, shard: Shard, *, seed: int, outer_iter: int, job: int) -> npt.NDArray[np.str_]:
        """Return the utterance id of each row of `minibatches` with the same arguments."""
        file = self.archive_arrays(shard.archive)
        at_N = _Rows(file, shard.frame, self.info).at_N
        order_N = at_N[np.random.default_rng((seed, outer_iter, job)).permutation(len(at_N))]
        return np.array(self._utterances()["utt_ids"])[file["utterance"][order_N]]

    def example(self, archive: int, index: int) -> Example:
        """Return an example of an archive; only its data are read after the first checksum."""
        if not (0 <= archive < self.info.num_archives and 0 <= index < self.info.num_examples[archive]):
            raise DataError(f"{self.directory} has no example {index} in archive {archive}: it "
                            f"holds {self.info.num_archives} archives of up to "
                            f"{max(self.info.num_examples)} examples; choose smaller numbers.")
        file = self.archive_arrays(archive)
        pdf_F = file["pdf"][index].copy()
        weight_EF = file.get("weight")
        weight_F = np.ones(len(pdf_F), np.float32) if weight_EF is None else weight_EF[index].copy()
        named, utterance = self._utterances(), int(file["utterance"][index])
        group = named["groups"][utterance] if named["groups"] else ""
        side_FS = file["side"][file["side_row"][index]] if self.info.side_dim else None
        return Example(file["features"][index].copy(), pdf_F, weight_F, named["utt_ids"][utterance], group, side_FS)

    def diagnostic(self, subset: str) -> Minibatch:
        """Return the fixed subset "train" or "valid", copied to memory."""
        file = self._opened(diagnostic_name(subset))
        weight_N = file.get("weight")
        return Minibatch(torch.tensor(file["features"]), torch.tensor(file["pdf"]).long(),
                         None if weight_N is None else torch.tensor(weight_N))

    def num_frames(self, shard: Shard) -> int:
        """Total rows of the minibatches of `shard`."""
        return self.info.num_rows[shard.archive][shard.frame]

    def num_minibatches(self, shard: Shard, size: int) -> int:
        """Number of minibatches of `size` rows in a pass over `shard`."""
        return math.ceil(self.num_frames(shard) / size)

    def archive_arrays(self, archive: int) -> ArrayFile:
        """Return the mapped arrays of an archive; see `ngsgd.data.examples.write_archive`."""
        return self._opened(archive_name(archive), archive)

    def groups(self) -> tuple[list[str], list[str]]:
        """Return (utterance ids, group of each) by index; no groups if they are unknown."""
        named = self._utterances()
        return named["utt_ids"], named["groups"]

    def offer(self) -> Offer:
        """Describe the directory to nodes that do not see it."""
        beside = [path.name for path in sorted(self.directory.glob(BESIDE))]
        return offer_of(self.directory, [INDEX, *beside], self.info.sha256)

    def prefetch(self, archives: Sequence[int]) -> None:
        """Fetch archives in the background, on a node that does not see the directory."""
        self.files.prefetch([self._digest(archive_name(archive)) for archive in archives])

    def _utterances(self) -> dict[str, list[str]]:
        try:
            path = self.files.path(UTTERANCES, self._digest(UTTERANCES))
        except UnsoundFileError as error:
            raise DataError(str(error)) from error
        try:
            named = read_json(path)
            return {key: list(map(str, named[key])) for key in ("utt_ids", "groups")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a list of utterances ({error}); remove "
                            f"{self.directory} and run again.") from error

    def _opened(self, name: str, archive: int | None = None) -> ArrayFile:
        return opened(self.files, self.directory, name, self._digest(name), archive)

    def _digest(self, name: str) -> str:
        return str(self.info.sha256.get(name, ""))


def index_in(directory: Path, files: Files, name: str, what: str, read: Callable[[Path], Item]) -> Item:
    """Return the index of a directory; raise DataError if it is missing or damaged."""
    try:
        return read(files.root(name))
    except UnsoundFileError as error:
        raise DataError(str(error)) from error
    except FormatError as error:
        raise DataError(f"{directory} is not a directory of {what} ({error}); remove it and run again.") from error


def opened(files: Files, directory: Path, name: str, digest: str, archive: int | None = None) -> ArrayFile:
    """Return the mapped arrays of a file of `directory`.

    Raises DamagedArchiveError if the file, archive number `archive`, is missing or damaged, and
    DataError if it is no archive; NodeCacheError if there is no room to fetch it.
    """
    try:
        return files.arrays(name, digest)
    except (UnsoundFileError, FormatError, OSError) as error:
        message = str(error) if isinstance(error, UnsoundFileError) else \
            f"{directory / name} cannot be read ({error}); remove {directory} and run again."
        raise (DataError(message) if archive is None else DamagedArchiveError(message, archive)) from error


class _Rows:
    def __init__(self, file: ArrayFile, frame: int, info: EgsInfo) -> None:
        self.file = file
        self.width = info.left_context + 1 + info.right_context
        pdf_E = file["pdf"][:, frame]
        weight_EF = file.get("weight")
        weight_E = None if weight_EF is None else weight_EF[:, frame]
        self.at_N = np.flatnonzero(is_row(pdf_E, weight_E))
        # a spliced frame is contiguous within its example
        flat = torch.from_numpy(file["features"]).flatten(1)
        self._x_ED = flat[:, frame * info.feature_dim:(frame + self.width) * info.feature_dim]
        self._side_KS, self._side_row_E = None, None
        if info.side_dim:
            self._side_KS = torch.from_numpy(file["side"])
            self._side_row_E = torch.from_numpy(file["side_row"][:, frame].astype(np.int64))
        self._pdf_E = torch.from_numpy(pdf_E.astype(np.int64))
        self._weight_E = None if weight_E is None else torch.from_numpy(weight_E.copy())

    def minibatch(self, at_N: npt.NDArray[np.int64], pin_memory: bool) -> Minibatch:
        chosen_N = torch.from_numpy(at_N)
        num_spliced, side_dim = self._x_ED.shape[1], 0 if self._side_KS is None else self._side_KS.shape[1]
        x_ND = torch.empty(len(at_N), num_spliced + side_dim, pin_memory=pin_memory)
        torch.index_select(self._x_ED, 0, chosen_N, out=x_ND[:, :num_spliced])
        if self._side_KS is not None and self._side_row_E is not None:
            torch.index_select(self._side_KS, 0, self._side_row_E[chosen_N], out=x_ND[:, num_spliced:])
        return Minibatch(x_ND, self._pdf_E[chosen_N], None if self._weight_E is None else self._weight_E[chosen_N])


# of a time mask in frames and of a frequency mask in features
MAX_WIDTHS = (3, 8)


def mask_windows(x_ND: Tensor, window: int, random: np.random.Generator, out: Tensor | None = None,
                 probability: float = 0.5, max_widths: tuple[int, int] = MAX_WIDTHS) -> Tensor:
    """Mask rows of `window` spliced frames, each with the given probability; `out` may be `x_ND`.

    SpecAugment (arXiv 1904.08779, section 2) of each row, without time warping. A range of frames
    and a range of features are replaced by the mean of the row. Widths up to `max_widths` and
    starts are uniform random.
    """
    num_rows, dim = len(x_ND), x_ND.shape[1] // window
    is_chosen_N = random.random(num_rows) < probability
    time_NW = _covered(random, num_rows, window, max_widths[0])
    freq_ND = _covered(random, num_rows, dim, max_widths[1])
    hidden_NWD = is_chosen_N[:, None, None] & (time_NW[:, :, None] | freq_ND[:, None, :])
    return torch.where(torch.from_numpy(hidden_NWD).flatten(1), x_ND.mean(dim=1, keepdim=True), x_ND, out=out)


def _covered(random: np.random.Generator, num_rows: int, size: int, max_width: int) -> npt.NDArray[np.bool_]:
    """Rows x size: positions covered by the mask of each row."""
    width_N = random.integers(0, min(max_width, size), size=num_rows, endpoint=True)
    begin_N = np.floor(random.random(num_rows) * (size - width_N + 1)).astype(np.int64)
    place_S = np.arange(size)
    return np.asarray((place_S >= begin_N[:, None]) & (place_S < (begin_N + width_N)[:, None]))


def ahead(items: Iterator[Item], depth: int) -> Iterator[Item]:
    """Yield `items`, up to `depth` of them prepared by a thread; exceptions keep their position."""
    if not depth:
        yield from items
        return
    end, pool = object(), ThreadPoolExecutor(1, _PREFETCH)
    try:
        ready = deque(pool.submit(next, items, end) for _ in range(depth))
        while (item := ready.popleft().result()) is not end:
            ready.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        # garbage collection may close a generator in its own thread, which cannot wait for itself
        pool.shutdown(wait=threading.current_thread().name != f"{_PREFETCH}_0", cancel_futures=True)
