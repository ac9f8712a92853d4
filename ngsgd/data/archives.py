"""Archives of training examples for `EgsReader`, written once per corpus.

An example holds `frames_per_eg` consecutive frames with their context. It gives one frame per pass
(C.2 of arXiv 1410.7455, nnet3 egs in Kaldi). Examples are shuffled over all archives. The files are
the same for any number of writing processes.

Letters: T frames, D feature dimension, N rows.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd.config import EgsConfig
from ngsgd.data import columns, mapped
from ngsgd.data.examples import NO_FRAME, ArchiveEntry, ExampleSource, Target, shuffled, windows, write_archive, write_in_processes
from ngsgd.data.frames import FrameSet
from ngsgd.data.storage import FormatError, write_arrays
from ngsgd.errors import DataError
from ngsgd.files import (
    FORMATS,
    cache_name,
    new_file,
    read_json,
    require_room,
    sealed,
    sha256,
    shared_directory,
    unsealed,
    write_text,
)
from ngsgd.phase import Phase

__all__ = ["NO_FRAME", "EgsInfo", "archive_name", "diagnostic_name", "prepare_archives",
           "read_index", "spliced_utterances", "write_archives"]

# format of the files; increase it after a change, so that old files are not reused
INDEX = "info.json"
UTTERANCES = "utterances.json"
# minimum bytes per writing process, whose start takes about 0.3 s
_WORTH_A_PROCESS = 1 << 26


@dataclass(frozen=True)
class EgsInfo:
    """The index of a directory of archives, stored in info.json with a checksum."""

    num_archives: int
    frames_per_eg: int
    left_context: int
    right_context: int
    feature_dim: int
    num_classes: int
    num_frames: int  # all frames with a class and a weight, counted once
    num_examples: list[int]      # per archive
    num_rows: list[list[int]]  # per archive and position in an example: frames in one pass
    has_weights: bool
    silence_classes: list[int]  # for the silence fractions in diagnostics; may be empty
    sha256: dict[str, str]  # of every other file in the directory
    side_dim: int = 0  # dimension of the side rows (inputs besides the features)

    @property
    def num_inputs(self) -> int:
        """Size of a spliced frame with its side row."""
        return self.num_spliced + self.side_dim

    @property
    def num_spliced(self) -> int:
        """Size of a spliced frame without its side row."""
        return (self.left_context + 1 + self.right_context) * self.feature_dim


def read_index(directory: Path) -> EgsInfo:
    """Read the index of a directory of archives, and check its checksum and consistency.

    Raises FormatError if it is missing, damaged or of another format; the message is the reason.
    """
    return read_index_file(directory / INDEX)


def read_index_file(path: Path) -> EgsInfo:
    """Read the file of an index; raises FormatError as `read_index`."""
    try:
        return EgsInfo(**unsealed("archives", read_json(path)))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"its info.json cannot be read: {error}") from error


def prepare_archives(train: FrameSet, valid: FrameSet, config: EgsConfig, *, num_classes: int,
                     digest: str, cache_root: Path, groups: Sequence[str] = (),
                     silence_classes: Sequence[int] = (), num_writers: int | None = None,
                     report: Callable[[str], None] = print) -> Path:
    """Return the directory of the archives for these data and settings, and write it if needed.

    A directory with a damaged index is written again. Incomplete files are removed after an error.

    Args:
        train: training frames.
        valid: validation frames.
        config: the section `egs`.
        num_classes: number of classes of the labels.
        digest: identifies the content of the frame sets.
        cache_root: parent of the directory.
        groups: group of each training utterance, such as its speaker, for the shuffle statistics.
        silence_classes: classes that the fraction of silence in the diagnostics counts.
        num_writers: number of writing processes. Default: up to one per core for mapped features.
        report: receives a message if a damaged directory is replaced.

    Raises:
        DataError: the frames cannot be used for training, or the disk is full.
    """
    # options that do not change the content of the files are not part of the name
    content = {name: getattr(config, name) for name in ("left_context", "right_context", "frames_per_eg", "samples_per_iter",
                                                        "num_diagnostic_frames")}
    directory = cache_root / cache_name("egs", version=FORMATS["archives"], corpus=digest, settings=content,
                                        num_classes=num_classes, silence_classes=list(silence_classes))

    def check(index: Path) -> None:
        info = read_index_file(index)
        if (info.left_context, info.right_context, info.frames_per_eg, info.num_classes, info.silence_classes) != (
                config.left_context, config.right_context, config.frames_per_eg, num_classes, list(silence_classes)):
            raise FormatError("the settings in its info.json differ from those of the directory name")
    return prepared(directory / INDEX, "archives of training examples", check, lambda temporary: write_archives(
        train, valid, config, num_classes=num_classes, directory=temporary, groups=groups,
        silence_classes=silence_classes, num_writers=num_writers), report)


def prepared(index: Path, what: str, check: Callable[[Path], object], write: Callable[[Path], object],
             report: Callable[[str], None]) -> Path:
    """Return the directory of an index, and write it if it is missing, or `check` finds damage.

    Raises DataError if the disk is full.
    """
    directory = index.parent
    if directory.is_dir():
        try:
            check(index)
            return directory
        except FormatError as error:
            report(f"{directory} is damaged ({error}); preparing it again.")
    report(Phase(f"writing the {what}"))
    try:
        # shared_directory keeps a directory that has an index
        index.unlink(missing_ok=True)
        with shared_directory(directory, index.name) as temporary:
            write(temporary)
    except OSError as error:
        raise DataError(f"the {what} could not be written under {directory.parent} ({error.strerror or error}); free disk "
                        "space, or choose another folder with data.cache_dir=PATH.") from error
    return directory


def write_archives(train: FrameSet, valid: FrameSet, config: EgsConfig, *, num_classes: int,
                   directory: Path, groups: Sequence[str] = (), silence_classes: Sequence[int] = (),
                   num_writers: int | None = None) -> None:
    """Write archives, two fixed diagnostic subsets and the index; deterministic in its inputs."""
    train, valid = (_checked(frames, num_classes) for frames in (train, valid))
    # the order on disk; readers shuffle again with the seed of the run
    random = np.random.default_rng(0)
    source = shuffled(train, random, left_context=config.left_context,
                      right_context=config.right_context, frames_per_eg=config.frames_per_eg)
    require_room(directory.parent, len(source.order_E) * source.example_bytes, "the archives of examples", "data.cache_dir",
                 DataError)
    entries = _write(source, config, directory, num_writers)
    # its order of the examples
    del source
    files = {archive_name(index): entry.sha256 for index, entry in enumerate(entries)}
    for name, frames in ((diagnostic_name("train"), train), (diagnostic_name("valid"), valid)):
        files[name] = _write_diagnostic(frames, config, random, directory / name)
    with new_file(directory / UTTERANCES) as temporary, temporary.open("w", encoding="utf-8") as file:
        columns.write_json(file, {"utt_ids": train.utt_ids, "groups": groups})
    files[UTTERANCES] = sha256(directory / UTTERANCES)
    num_rows = [entry.num_rows for entry in entries]
    info = EgsInfo(len(entries), config.frames_per_eg, config.left_context, config.right_context,
                   train.dim, num_classes, sum(map(sum, num_rows)),
                   [entry.num_examples for entry in entries], num_rows, train.weight_T is not None,
                   list(silence_classes), files, train.side_dim)
    write_text(directory / "info.json", json.dumps(sealed("archives", asdict(info)), indent=1))


def archive_name(index: int) -> str:
    """File name of archive `index`, from 0."""
    return f"egs.{index:04d}.safetensors"


def diagnostic_name(subset: str) -> str:
    """File name of the diagnostic subset "train" or "valid"."""
    return f"{subset}_diagnostic.safetensors"


def spliced_utterances(frames: FrameSet, left_context: int, right_context: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield each utterance as a matrix of spliced frames with side rows, for decoding.

    The outermost frames are repeated at the edges.
    """
    for first, end in zip(frames.offsets[:-1], frames.offsets[1:], strict=True):
        row_TW = np.arange(first, end)[:, None] + np.arange(-left_context, right_context + 1)
        spliced_TI = frames.features_TD[np.clip(row_TW, first, end - 1)].reshape(end - first, -1)
        yield _with_side(spliced_TI, frames, np.arange(first, end))


def _with_side(spliced_NI: npt.NDArray[np.float32], frames: FrameSet, at_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    side = frames.side
    return np.hstack([spliced_NI, side.rows_RS[side.row_T[at_N]]]) if side else spliced_NI


def _checked(frames: FrameSet, num_classes: int) -> FrameSet:
    if frames.num_frames == 0:
        raise DataError("there are no training frames; check the split and data.train_minutes.")
    edges = [(int(block_T.min()), int(block_T.max())) for block_T in mapped.blocks(frames.pdf_T)]
    low, high = min(edges)[0], max(edge for _, edge in edges)
    if low < 0 or high >= num_classes:
        raise DataError(f"frame classes range from {low} to {high}, but the alignment has "
                        f"{num_classes} classes; prepare the data again.")
    begin = 0
    for block_TD in mapped.blocks(frames.features_TD):
        is_finite_TD = np.isfinite(block_TD)
        if not is_finite_TD.all():
            row = begin + int(np.argwhere(~is_finite_TD)[0, 0])
            utterance = int(np.searchsorted(frames.offsets, row, "right")) - 1
            raise DataError(f"utterance {frames.utt_ids[utterance]} has a feature that is not finite; check its audio.")
        begin += len(block_TD)
    weight_T = frames.weight_T
    if weight_T is not None and (not np.isfinite(weight_T).all() or weight_T.min() < 0.0 or weight_T.max() == 0.0):
        raise DataError(f"the weights of frames range from {weight_T.min()} to {weight_T.max()}, "
                        "but must be finite, at least 0, and not all 0; check the data.")
    return frames


def _write(source: ExampleSource, config: EgsConfig, directory: Path, num_writers: int | None) -> list[ArchiveEntry]:
    num_examples = len(source.order_E)
    num_archives = max(1, round(num_examples / config.samples_per_iter))
    # equal parts, as `np.array_split` divides
    size, num_larger = divmod(num_examples, num_archives)
    bounds = [part * size + min(part, num_larger) for part in range(num_archives + 1)]
    targets = [Target(str(directory / archive_name(index)), begin, end)
               for index, (begin, end) in enumerate(itertools.pairwise(bounds))]
    if num_writers is None:
        in_memory = not isinstance(source.features_TD, np.memmap)
        num_writers = 1 if in_memory else max(
            1, min(os.cpu_count() or 1, num_examples * source.example_bytes // _WORTH_A_PROCESS))
    num_writers = min(num_writers, num_archives)
    if num_writers == 1:
        return [write_archive(source, target.begin, target.end, Path(target.path)) for target in targets]
    scratch = directory / "scratch"
    scratch.mkdir()
    try:
        return write_in_processes(source, targets, num_writers, scratch)
    finally:
        shutil.rmtree(scratch)


def _write_diagnostic(frames: FrameSet, config: EgsConfig, random: np.random.Generator, path: Path) -> str:
    """Write a fixed sample of spliced frames; return the SHA-256 of the file."""
    usable: int | npt.NDArray[np.int64] = frames.num_frames if frames.weight_T is None else np.flatnonzero(frames.weight_T)
    num_usable = usable if isinstance(usable, int) else len(usable)
    chosen_N = np.sort(random.choice(usable, min(config.num_diagnostic_frames, num_usable), replace=False))
    utterance_N = np.searchsorted(frames.offsets, chosen_N, "right") - 1
    begin_N1, end_N1 = frames.offsets[utterance_N][:, None], frames.offsets[utterance_N + 1][:, None]
    row_NW = np.clip(chosen_N[:, None] + np.arange(-config.left_context, config.right_context + 1), begin_N1, end_N1 - 1)
    features_ND = _with_side(windows(frames.features_TD, row_NW).reshape(len(chosen_N), -1), frames, chosen_N)
    rest = {} if frames.weight_T is None else {"weight": windows(frames.weight_T, chosen_N[:, None])[:, 0]}
    return write_arrays(path, "features", features_ND.shape, [features_ND],
                        {**rest, "pdf": windows(frames.pdf_T, chosen_N[:, None])[:, 0]})
