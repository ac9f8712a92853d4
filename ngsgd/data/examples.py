"""Conversion of frames, which may be memory-mapped, to the arrays of an archive, in chunks.

Letters: E examples, F frames per example, W window of an example with its context, D feature
dimension, T frames. R side rows of S values (inputs besides the features), K those of an archive.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.data import mapped
from ngsgd.data.frames import FrameSet
from ngsgd.data.storage import write_arrays
from ngsgd.errors import DataError

# class of the positions of an example after the end of its utterance
NO_FRAME = -1
# bytes of features in memory at once; large enough for few seeks
PIECE_BYTES = 1 << 25
# a window of a mapped file brings 64 kB of pages into memory
_WINDOWS_AT_ONCE = 256

Ints = npt.NDArray[np.int64]


class ArchiveEntry(NamedTuple):
    """Index entry of one archive."""

    sha256: str
    num_examples: int
    num_rows: list[int]  # frames with a class and a weight, per position in an example


@dataclass(frozen=True)
class ExampleSource:
    """The frames of a corpus divided into examples, in the order of the archives."""

    features_TD: npt.NDArray[np.float32]
    pdf_T: npt.NDArray[np.int32]
    weight_T: npt.NDArray[np.float32] | None
    offsets: Ints           # of the utterances
    order_E: Ints  # numbers of the examples, which are counted in the order of the frames
    begin_U: Ints  # number of the first example of each utterance, and the number of all
    left_context: int
    right_context: int
    frames_per_eg: int
    side_RS: npt.NDArray[np.float32] | None = None  # see `Side`
    side_T: npt.NDArray[np.int32] | None = None

    def place(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """First frame and utterance of the examples from `begin` to `end`."""
        example_E = mapped.copied(self.order_E[begin:end])
        utterance_E = np.searchsorted(self.begin_U, example_E, "right") - 1
        first_E = self.offsets[utterance_E] + (example_E - self.begin_U[utterance_E]) * self.frames_per_eg
        return first_E, utterance_E

    @property
    def window(self) -> int:
        return self.left_context + self.frames_per_eg + self.right_context

    @property
    def example_bytes(self) -> int:
        """Bytes of one example in an archive."""
        per_frame = 4 if self.weight_T is None else 8
        # the worst case: a row for each frame
        if self.side_RS is not None:
            per_frame += 4 + 4 * int(self.side_RS.shape[1])
        return 4 * self.window * int(self.features_TD.shape[1]) + per_frame * self.frames_per_eg + 4


def shuffled(frames: FrameSet, random: np.random.Generator, *, left_context: int, right_context: int,
             frames_per_eg: int) -> ExampleSource:
    """Return all examples of these frames in random order."""
    begin_U = begins(frames.offsets, frames_per_eg)
    side_RS, side_T = (frames.side.rows_RS, frames.side.row_T) if frames.side else (None, None)
    return ExampleSource(frames.features_TD, frames.pdf_T, frames.weight_T, frames.offsets,
                         random.permutation(int(begin_U[-1])), begin_U, left_context, right_context, frames_per_eg,
                         side_RS, side_T)


def begins(offsets: Ints, frames_per_eg: int) -> Ints:
    """Number of the first example of each utterance, and the number of all examples."""
    return np.concatenate([[0], np.cumsum(-(-np.diff(offsets) // frames_per_eg))])


def write_archive(source: ExampleSource, begin: int, end: int, path: Path) -> ArchiveEntry:
    """Write examples `begin` to `end` of the source as one archive.

        features  E x W x D   float32
        weight    E x F       float32, only if the source has weights
        pdf       E x F       int32, NO_FRAME after the end of the utterance
        utterance E           int32, index into utterances.json
        side      K x S       float32, only if the source has side rows
        side_row  E x F       int32, index into side, only with side
    """
    first_E, utterance_E = source.place(begin, end)
    begin_E1, end_E1 = source.offsets[utterance_E][:, None], source.offsets[utterance_E + 1][:, None]
    frame_EF = first_E[:, None] + np.arange(source.frames_per_eg)
    inside_EF, at_EF = frame_EF < end_E1, np.minimum(frame_EF, end_E1 - 1)
    rest: dict[str, npt.NDArray[Any]] = {}
    if source.weight_T is not None:
        rest["weight"] = np.where(inside_EF, windows(source.weight_T, at_EF), 0.0).astype(np.float32)
    rest["pdf"] = np.where(inside_EF, windows(source.pdf_T, at_EF), NO_FRAME).astype(np.int32)
    rest["utterance"] = utterance_E.astype(np.int32)
    if source.side_RS is not None and source.side_T is not None:
        used_K, row_EF = np.unique(source.side_T[at_EF], return_inverse=True)
        rest |= {"side": np.ascontiguousarray(source.side_RS[used_K]), "side_row": row_EF.reshape(at_EF.shape).astype(np.int32)}
    shape = (end - begin, source.window, int(source.features_TD.shape[1]))
    window_W = np.arange(-source.left_context, source.frames_per_eg + source.right_context)
    size = max(1, PIECE_BYTES // source.example_bytes)
    parts = (slice(start, start + size) for start in range(0, len(first_E), size))
    pieces = (windows(source.features_TD, np.clip(first_E[part, None] + window_W, begin_E1[part], end_E1[part] - 1))
              for part in parts)
    digest = write_arrays(path, "features", shape, pieces, rest)
    return ArchiveEntry(digest, end - begin, is_row(rest["pdf"], rest.get("weight")).sum(axis=0).tolist())


def is_row(pdf: npt.NDArray[np.int32], weight: npt.NDArray[np.float32] | None) -> npt.NDArray[np.bool_]:
    """Positions of examples that give a row: those with a class, unless their weight is 0."""
    has_class = pdf != NO_FRAME
    return np.asarray(has_class if weight is None else has_class & (weight > 0.0))


def windows(rows: npt.NDArray[Any], row_EW: Ints) -> npt.NDArray[Any]:
    """E x W windows of features or labels, read in increasing order, which is faster on disks."""
    order_E = np.argsort(row_EW[:, 0], kind="stable")
    found = np.empty((*row_EW.shape, *rows.shape[1:]), rows.dtype)
    for begin in range(0, len(order_E), _WINDOWS_AT_ONCE):
        part = order_E[begin:begin + _WINDOWS_AT_ONCE]
        found[part] = rows[row_EW[part]]
        mapped.release(rows)
    return found


class Target(NamedTuple):
    """One archive to write: examples `begin` to `end`."""

    path: str
    begin: int
    end: int


def write_in_processes(source: ExampleSource, targets: Sequence[Target], num_writers: int, scratch: Path) -> list[ArchiveEntry]:
    """Write all targets in new processes and return their index entries, in order.

    A process runs `python -m ngsgd.data.examples`, which reads its work as one line of JSON, maps
    the arrays and replies with one line. It is not a fork, because the caller may run threads.
    Arrays that are not in files already are written to `scratch`.
    """
    fields = vars(source).items()
    arrays = {name: _on_disk(value, scratch / name) for name, value in fields if isinstance(value, np.ndarray)}
    numbers = {name: value for name, value in fields if isinstance(value, int)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for part in np.array_split(np.arange(len(targets)), num_writers):
            processes.append(subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            work = [arrays, numbers, [targets[at] for at in part]]
            # if it has died already, `_answer` reports it
            with contextlib.suppress(BrokenPipeError):
                processes[-1].stdin.write(json.dumps(work).encode() + b"\n")  # type: ignore[union-attr]
                processes[-1].stdin.flush()  # type: ignore[union-attr]
        return [entry for process in processes for entry in _answer(process)]
    finally:
        # after a failure the results of the other processes are not needed
        for process in processes:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[bytes]) -> list[ArchiveEntry]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise DataError(f"a process that wrote archives of examples ended with {process.wait()}; "
                        "look for its error above, free memory, and run again.")
    answer = json.loads(line)
    if "errno" in answer:
        raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["filename"])
    return [ArchiveEntry(*entry) for entry in answer["entries"]]


def _on_disk(array: np.ndarray[Any, Any], path: Path) -> list[Any]:
    """File, type, offset and shape for another process: the mapped file, or a new one at `path`."""
    # a slice of a map keeps the offset of the complete array
    is_part = isinstance(array.base, np.ndarray)
    if isinstance(array, np.memmap) and array.filename is not None and array.flags.c_contiguous and not is_part:
        return [str(array.filename), array.dtype.str, array.offset, array.shape]
    with path.open("wb") as file:
        for block in mapped.blocks(array):
            file.write(np.ascontiguousarray(block).data.cast("B"))
    return [str(path), array.dtype.str, 0, array.shape]


def main() -> None:
    """Write the archives that standard input names."""
    arrays, numbers, targets = json.loads(sys.stdin.readline())
    found: dict[str, Any] = {name: np.memmap(file, dtype, "r", offset, tuple(shape))
                             for name, (file, dtype, offset, shape) in arrays.items()}
    source = ExampleSource(**{"weight_T": None, **found}, **numbers)
    try:
        answer: dict[str, Any] = {"entries": [write_archive(source, begin, end, Path(path)) for path, begin, end in targets]}
    except OSError as error:
        answer = {"errno": error.errno, "filename": error.filename}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
