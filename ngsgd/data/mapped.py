"""Matrices in .npy files, written and read in blocks: memory does not depend on their length.

Letters: T rows, D columns.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

# rows of a block; 40 features: 10 MB
BLOCK_ROWS = 1 << 16


def write_rows(path: Path, shape: tuple[int, int], pieces: Iterable[Matrix]) -> Matrix:
    """Write pieces of rows as one .npy file, as `np.save` writes it, and map it read-only.

    Args:
        path: the file.
        shape: number of all rows, and of columns.
        pieces: consecutive rows; one piece at a time is in memory.

    Raises:
        OSError: the disk is full.
    """
    with path.open("wb") as file:
        _write(file, shape, pieces)
    mapped: Matrix = np.load(path, mmap_mode="r")
    return mapped


def concatenated(pieces: Iterable[Matrix], shape: tuple[int, int], source: Matrix) -> Matrix:
    """Concatenate pieces: in memory, or in an unnamed file next to the file that `source` maps."""
    filename = getattr(source, "filename", None)
    if filename is None:
        return np.concatenate(list(pieces))
    # the system removes the file when its map is freed, and after a SIGKILL
    with tempfile.TemporaryFile(dir=Path(filename).parent) as file:
        begin = _write(file, shape, pieces)
        file.flush()
        return np.memmap(file, np.float32, "r", begin, shape)


def blocks(rows_TD: Matrix) -> Iterator[Matrix]:
    """Yield the rows in blocks; the pages of a mapped block are freed after its use."""
    for begin in range(0, len(rows_TD), BLOCK_ROWS):
        yield rows_TD[begin:begin + BLOCK_ROWS]
        release(rows_TD)


def copied(rows_TD: Matrix) -> Matrix:
    """Copy a few rows of a map, and free its pages."""
    found = np.array(rows_TD)
    release(rows_TD)
    return found


def release(array: npt.NDArray[np.generic]) -> None:
    """Free the pages of a memory-mapped array; the next access reads them again.

    The system drops them only when memory is short, and counts them as memory of the process. Other
    arrays than read-only maps are unchanged.
    """
    base: object = array
    # private changes of other maps would be lost
    is_unchanged = False
    while isinstance(base, np.ndarray):
        is_unchanged |= isinstance(base, np.memmap) and base.mode == "r"
        base = base.base
    if is_unchanged and isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def _write(file: BinaryIO, shape: tuple[int, int], pieces: Iterable[Matrix]) -> int:
    """Write header and rows; return the position of the first row."""
    layout = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, layout)
    begin, num_rows = file.tell(), 0
    for piece in pieces:
        file.write(np.ascontiguousarray(piece, np.float32).data.cast("B"))
        num_rows += len(piece)
    assert num_rows == shape[0]
    return begin
