"""Arrays in .npy files, written and read in blocks of bounded memory; T rows, D columns."""

from __future__ import annotations

import itertools
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]
Array = TypeVar("Array", bound=npt.NDArray[Any])

# rows of a block; 40 features: 10 MB
BLOCK_ROWS = 1 << 16


def write_rows(path: Path, shape: tuple[int, int], pieces: Iterable[Matrix]) -> Matrix:
    """Write pieces of rows, one at a time in memory, as `np.save` does; map the file read-only."""
    return write_array(path, shape, pieces, np.dtype(np.float32))


def write_array(path: Path, shape: tuple[int, ...], pieces: Iterable[npt.NDArray[Any]],
                dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Write an array of any type as `write_rows` does."""
    with path.open("wb") as file:
        _write(file, shape, pieces, dtype)
    mapped: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    return mapped


def concatenated(pieces: Iterable[Array], shape: tuple[int, ...], source: npt.NDArray[Any]) -> Array:
    """Concatenate pieces of one type: in memory, or in an unnamed file next to that of `source`."""
    filename = getattr(source, "filename", None)
    if filename is None:
        return np.concatenate(list(pieces))  # type: ignore[return-value]
    first = next(pieces := iter(pieces))
    # the system removes the file when its map is freed, and after a SIGKILL
    with tempfile.TemporaryFile(dir=Path(filename).parent) as file:
        begin = _write(file, shape, itertools.chain([first], pieces), first.dtype)
        file.flush()
        return np.memmap(file, first.dtype, "r", begin, shape)  # type: ignore[return-value]


def blocks(rows_TD: Array) -> Iterator[Array]:
    """Yield the rows in blocks; the pages of a mapped block are freed after its use."""
    for begin in range(0, len(rows_TD), BLOCK_ROWS):
        yield rows_TD[begin:begin + BLOCK_ROWS]  # type: ignore[misc]
        release(rows_TD)


def copied(rows_TD: Array) -> Array:
    """Copy a few rows of a map, and free its pages."""
    found = np.array(rows_TD)
    release(rows_TD)
    return found  # type: ignore[return-value]


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


def _write(file: BinaryIO, shape: tuple[int, ...], pieces: Iterable[npt.NDArray[Any]], dtype: np.dtype[Any]) -> int:
    layout = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, layout)
    begin, num_rows = file.tell(), 0
    for piece in pieces:
        file.write(np.ascontiguousarray(piece, dtype).data.cast("B"))
        num_rows += len(piece)
    assert num_rows == shape[0]
    return begin
