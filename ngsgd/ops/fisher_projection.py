"""Project minibatch rows onto the low-rank Fisher factor W: H = X W^T, X - H W and squared norms.

The GEMMs are thin (R is 20 to 80). As separate operations they read X four times and write it once.
`kernels/fisher_projection.cpp` makes one pass on a CPU, about 40 rows at a time in the cache.
Without a compiler, in float64 and on other devices, torch operations compute the same with another
summation order. Letters as in `ngsgd.ops.natural_gradient`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.ops import gemm
from ngsgd.ops.kernels import native
from ngsgd.ops.natural_gradient import FisherState, rescaling
from ngsgd.ops.polar_update import PolarState

# torch's names of the instruction sets that the C++ supports
PROCESSORS = ("AVX512", "AVX2")
SOURCE = Path(__file__).with_name("kernels") / "fisher_projection.cpp"
_Squares = ctypes.c_double * 2


class Projection(NamedTuple):
    """Result of a projection; the last three are None if Xhat was not requested."""

    # tr X X^T: a number on the host, or 0-d on a device to avoid a sync
    sum_sq: Tensor | float
    H_NR: Tensor                        # X W^T
    Xhat_ND: Tensor | None = None       # X - H W, before rescaling
    # its last column, if a 1 was appended
    one_hat_N: Tensor | None = None
    sum_sq_hat: Tensor | float | None = None


class Preconditioned(NamedTuple):
    """Rows times the inverse Fisher matrix; times `scale` they have their Frobenius norm."""

    Xhat_ND: Tensor
    one_hat_N: Tensor | None     # the appended column
    scale: Tensor | float        # gamma of (38)


class PreconditionContext(NamedTuple):
    """A minibatch between `begin` and `finish`: rows [X | one] and their projection."""

    X_ND: Tensor
    # Appended column: 1, or 0 for a masked row; None: no column.
    one_N: Tensor | None
    num_rows: Tensor | float     # rows that count
    # Factor of the rows that must not enter the estimate.
    loss_scale: Tensor | float
    estimate: FisherState | PolarState
    projection: Projection

    def preconditioned(self) -> Preconditioned:
        """Return the rows [Xhat | one_hat], and their scale."""
        projection = with_residual(self.projection, self.X_ND, self.estimate.right_RD, self.one_N)
        assert projection.Xhat_ND is not None and projection.sum_sq_hat is not None
        return Preconditioned(projection.Xhat_ND, projection.one_hat_N, self.scale(projection.sum_sq_hat))

    def scale(self, sum_sq_hat: Tensor | float) -> Tensor | float:
        """Return gamma of (38), given tr Xhat Xhat^T."""
        return rescaling(self.projection.sum_sq, sum_sq_hat)


def project(X_ND: Tensor, W_RD: Tensor, one_N: Tensor | None = None,
            scratch: Tensor | None = None, *, right_RD: Tensor | None = None, corrects: bool = True) -> Projection:
    """Project contiguous rows [X | one] onto W; `corrects`: also compute Xhat = X - H right_RD."""
    right_RD = W_RD if right_RD is None else right_RD
    if right_RD is not W_RD or not _is_native(X_ND, W_RD, one_N):
        projection = Projection(sum_of_squares(X_ND, one_N), coefficients(X_ND, W_RD, one_N))
        return with_residual(projection, X_ND, right_RD, one_N, scratch) if corrects else projection
    library, (N, D), R = load_library(), X_ND.shape, W_RD.shape[0]
    H_NR = X_ND.new_empty(N, R)
    Xhat_ND = one_hat_N = None
    if corrects:
        Xhat_ND = torch.empty_like(X_ND) if scratch is None else scratch
        one_hat_N = None if one_N is None else torch.empty_like(one_N)
    threads = torch.get_num_threads()
    work, squares = native.work_memory(workspace_size(D + (one_N is not None), R, threads)), _Squares()
    library.project(X_ND.data_ptr(), N, D, native.address(one_N), W_RD.data_ptr(), W_RD.stride(0), R, H_NR.data_ptr(),
                    native.address(Xhat_ND), native.address(one_hat_N), work.data_ptr(), squares, threads)
    return Projection(squares[0], H_NR, Xhat_ND, one_hat_N, squares[1] if corrects else None)


def with_residual(projection: Projection, X_ND: Tensor, W_RD: Tensor, one_N: Tensor | None = None,
                  scratch: Tensor | None = None) -> Projection:
    """Add Xhat, the rows times beta_t G_t^-1 (36, 80) before rescaling, to a projection."""
    if projection.Xhat_ND is not None:
        return projection
    Xhat_ND = gemm.sub_matmul(X_ND, projection.H_NR, W_RD[:, :X_ND.shape[1]], scratch)
    one_hat_N = None if one_N is None else torch.addmv(one_N, projection.H_NR, W_RD[:, -1], alpha=-1)
    return projection._replace(Xhat_ND=Xhat_ND, one_hat_N=one_hat_N, sum_sq_hat=sum_of_squares(Xhat_ND, one_hat_N))


def sum_of_squares(X_ND: Tensor, one_N: Tensor | None = None) -> Tensor | float:
    """Return tr X X^T of contiguous rows: a number, or 0-d on a device to avoid a sync."""
    flat = X_ND.view(-1)
    total = torch.dot(flat, flat)
    if one_N is not None:
        total += torch.dot(one_N, one_N)
    return total.item() if X_ND.is_cpu else total


def row_norms(X_ND: Tensor, one_N: Tensor | None = None) -> Tensor:
    """Return the L2 norm of each row [X | one]."""
    sum_sq_N = X_ND.square().sum(dim=1)
    return (sum_sq_N if one_N is None else sum_sq_N + one_N.square()).sqrt()


def coefficients(X_ND: Tensor, W_RD: Tensor, one_N: Tensor | None = None) -> Tensor:
    """Return H_t (79), computed as its transpose: few long rows are faster than many short ones."""
    if one_N is None:
        return gemm.mm(W_RD, X_ND.T).T
    return gemm.mm(W_RD[:, :-1], X_ND.T).addr_(W_RD[:, -1], one_N).T


def is_native() -> bool:
    """Return whether there is compiled code for this processor; compiles it if necessary."""
    return load_library() is not None


def _is_native(X_ND: Tensor, W_RD: Tensor, one_N: Tensor | None) -> bool:
    return (X_ND.dtype == torch.float32 == W_RD.dtype and X_ND.is_cpu and W_RD.is_cpu and W_RD.stride(1) == 1 and X_ND.numel() > 0
            and (one_N is None or (one_N.dtype == torch.float32 and one_N.is_contiguous()))
            and not (torch.is_grad_enabled() and X_ND.requires_grad) and native.is_allowed() and load_library() is not None)


@functools.cache
def workspace_size(num_columns: int, rank: int, threads: int) -> int:
    """Return the number of floats that the kernel needs."""
    return int(load_library().work_size(num_columns, rank, threads))


@functools.cache
def load_library() -> Any:
    """Load the kernel; None without a compiler or on other processors."""
    if native.capability() not in PROCESSORS:
        return None
    a, n = native.ADDRESS, native.NUMBER
    return native.threaded(SOURCE, work_size=(n, n, n, native.THREADS),
                           project=(None, a, n, n, a, a, n, n, a, a, a, a,
                                    ctypes.POINTER(ctypes.c_double), native.THREADS))
