"""Weight gradients dW = dY^T X by custom C++, on processors where it is faster than a library.

X is packed in panels of 48 columns, which `ngsgd.ops.fisher_projection` writes directly; a library
GEMM would first copy it. The bias gradient, and a rank-R correction in R additional rows, take no
further pass over dW. It is used on Intel processors with AVX-512; on AMD processors
`ngsgd.ops.gemm` is faster.

Letters: N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.kernels import native

# Columns of a panel, as in the sources in kernels/.
WIDTH = 48
MIN_PRODUCTS = 1 << 21   # multiplications
# With fewer rows (and outputs relative to inputs), writing dW dominates, and MKL is equally fast.
MANY_ROWS, _MANY_OUTPUTS = 256, 4
SOURCE = Path(__file__).with_name("kernels") / "packed_gemm.cpp"


class PackedMatrix(NamedTuple):
    """A matrix in panels of 48 columns, with space for additional rows."""

    # panels x (rows and space) x 48; numbers past the last column are undefined
    memory: Tensor
    num_rows: int
    num_columns: int

    @classmethod
    def over(cls, memory: Tensor, num_rows: int, num_columns: int, room: int = 0) -> PackedMatrix:
        """Create it in flat memory of `size(num_rows + room, num_columns)` numbers."""
        return cls(memory.view(-1, num_rows + room, WIDTH), num_rows, num_columns)

    def rows(self) -> Tensor:
        """Return the unpacked matrix."""
        return self.memory[:, :self.num_rows].transpose(0, 1).reshape(self.num_rows, -1)[:, :self.num_columns]

    def fill(self, rows_NI: Tensor, first: int = 0, *, factor: float = 1.0) -> None:
        """Copy contiguous rows, times `factor`, to the rows from `first` on."""
        load_library().fill(rows_NI.data_ptr(), rows_NI.stride(0), len(rows_NI), self.num_columns, factor, self.memory.data_ptr(),
                        self.memory.shape[1], first, torch.get_num_threads())


class LowRankCorrection(NamedTuple):
    """Pending correction of the derivatives, dYhat = dY - H W, applied through R additional rows.
    """

    H_NR: Tensor
    W_RO: Tensor


def size(num_rows: int, num_columns: int) -> int:
    """Return the number of floats of the panels."""
    return -(-num_columns // WIDTH) * WIDTH * num_rows


def should_use(dY_NO: Tensor, X_NI: Tensor) -> bool:
    """Return whether `product` is faster for dY^T X.

    Depends on processor, dtypes and sizes only.
    """
    (N, O), I = dY_NO.shape, X_NI.shape[1]  # noqa: E741  the letters of above
    return (N * O * I >= MIN_PRODUCTS and (N >= MANY_ROWS or O >= _MANY_OUTPUTS * I)
            and dY_NO.dtype == torch.float32 == X_NI.dtype and dY_NO.is_cpu and X_NI.is_cpu
            and is_faster() and native.is_allowed() and load_library() is not None)


def is_native() -> bool:
    """Return whether `product` is used on this processor; compiles it if necessary."""
    return is_faster() and load_library() is not None


def product(dY: Tensor | PackedMatrix, X: PackedMatrix, scale: float, one_N: Tensor | None = None,
            correction: LowRankCorrection | None = None) -> tuple[Tensor, Tensor | None]:
    """Return (scale dY^T X, scale dY^T one or None).

    With `correction`, of dY - H W instead of dY.

    With a correction X must have space for R more rows, which are overwritten. Then one product, of
    dY and W with X and -H^T X, computes dY^T X - W^T (H^T X).
    """
    more_RO = None
    if correction is not None:
        taken_RI, of_one_R = product(correction.H_NR, X, 1.0, one_N)
        X.fill(taken_RI, X.num_rows, factor=-1.0)
        more_RO = correction.W_RO
        one_N = None if one_N is None or of_one_R is None else torch.cat([one_N, -of_one_R])
    at, pitch, panel, num_outputs = _place(dY)
    dW_OI = X.memory.new_empty(num_outputs, X.num_columns)
    db_O = None if one_N is None else X.memory.new_empty(num_outputs)
    threads = torch.get_num_threads()
    num_more = 0 if more_RO is None else len(more_RO)
    library = load_library()
    work = native.work_memory(library.work_size(X.num_rows + num_more, threads))
    library.product(at, pitch, panel, X.num_rows, native.address(more_RO), 0 if more_RO is None else more_RO.stride(0), num_more,
                    X.memory.data_ptr(), X.memory.shape[1], num_outputs, X.num_columns, scale, dW_OI.data_ptr(),
                    native.address(one_N), native.address(db_O), work.data_ptr(), threads)
    return dW_OI, db_O


def _place(dY: Tensor | PackedMatrix) -> tuple[int, int, int, int]:
    """Return (address, row stride, rows of a panel or 0, columns)."""
    if isinstance(dY, PackedMatrix):
        return dY.memory.data_ptr(), WIDTH, dY.memory.shape[1], dY.num_columns
    return dY.data_ptr(), dY.stride(0), 0, dY.shape[1]


@functools.cache
def is_faster() -> bool:
    """Return whether the kernel was measured to be faster on this kind of processor."""
    return native.capability() == "AVX512" and native.is_made_by("GenuineIntel")


@functools.cache
def load_library() -> Any:
    """Load the kernel; None without a compiler."""
    if native.capability() != "AVX512":
        return None
    a, n, real, threads = native.ADDRESS, native.NUMBER, native.REAL, native.THREADS
    return native.threaded(SOURCE, work_size=(n, n, threads), fill=(None, a, n, n, n, real, a, n, n, threads),
                           product=(None, a, n, n, n, a, n, n, a, n, n, n, real, a, a, a, a, threads))
