"""A process that writes some of the archives, started by `ngsgd.data.archives`.

`python -m ngsgd.data.write_process` reads one line of JSON (an `_Assignment`), maps the arrays that
it names, and replies with one line: the index entries, or the error of the system. It is not a
fork, because the caller may run threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd.data import mapped
from ngsgd.data.examples import ArchiveEntry, ExampleSource, write_archive
from ngsgd.errors import DataError

_ARRAYS = ("features_TD", "pdf_T", "weight_T", "offsets", "order_E", "begin_U", "side_RS",
           "side_T")


@dataclass(frozen=True)
class Target:
    """One archive to write: examples `begin` to `end`."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class _Assignment:
    """The work of one process."""

    # name in `ExampleSource` -> file, dtype, shape and offset
    arrays: dict[str, dict[str, Any]]
    # the other fields of `ExampleSource`
    numbers: dict[str, int]
    targets: list[Target]


def write_in_processes(source: ExampleSource, targets: Sequence[Target], num_writers: int,
                       scratch: Path) -> list[ArchiveEntry]:
    """Write all targets and return their index entries, in order.

    Args:
        source: the examples.
        targets: the archives.
        num_writers: number of processes.
        scratch: folder for arrays that are not in files already; the caller removes it.

    Raises:
        OSError: the disk is full.
        DataError: a process died.
    """
    arrays = {name: _on_disk(getattr(source, name), scratch / name) for name in _ARRAYS
              if getattr(source, name) is not None}
    numbers = {name: getattr(source, name) for name in ("left_context", "right_context",
                                                        "frames_per_eg")}
    shares = [[targets[i] for i in part]
              for part in np.array_split(np.arange(len(targets)), num_writers)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            processes.append(_start(_Assignment(arrays, numbers, share)))
        return [entry for process in processes for entry in _answer(process)]
    finally:
        # after a failure the results of the other processes are not needed
        for process in processes:
            process.kill()
            process.communicate()


def _start(assignment: _Assignment) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    # it has died already, which `_answer` reports
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asdict(assignment)).encode() + b"\n")
        process.stdin.flush()
    return process


def _answer(process: subprocess.Popen[bytes]) -> list[ArchiveEntry]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise DataError(f"a process that wrote archives of examples ended with {process.wait()}; "
                        "run again with egs.num_writers=1 to see the error.")
    answer = json.loads(line)
    if "errno" in answer:
        raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["filename"])
    return [ArchiveEntry(**entry) for entry in answer["entries"]]


def _on_disk(array: np.ndarray[Any, Any], path: Path) -> dict[str, Any]:
    """Describe the array for another process: the mapped file, or a new one at `path`."""
    place = {"filename": str(path), "dtype": array.dtype.str, "shape": list(array.shape),
             "offset": 0}
    # a slice of a map keeps the offset of the complete array
    is_part = isinstance(array.base, np.ndarray)
    if (isinstance(array, np.memmap) and array.filename is not None and array.flags.c_contiguous
            and not is_part):
        return {**place, "filename": str(array.filename), "offset": array.offset}
    with path.open("wb") as file:
        for block in mapped.blocks(array):
            file.write(np.ascontiguousarray(block).data.cast("B"))
    return place


def main() -> None:
    """Process one assignment from standard input."""
    given = json.loads(sys.stdin.readline())
    arrays: dict[str, Any] = {name: np.memmap(place["filename"], place["dtype"], "r",
                                              place["offset"], tuple(place["shape"]))
                              for name, place in given["arrays"].items()}
    source = ExampleSource(**{"weight_T": None, **arrays}, **given["numbers"])
    try:
        entries = [write_archive(source, target["begin"], target["end"], Path(target["path"]))
                   for target in given["targets"]]
        answer: dict[str, Any] = {"entries": [asdict(entry) for entry in entries]}
    except OSError as error:
        answer = {"errno": error.errno, "filename": error.filename}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
