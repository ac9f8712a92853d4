"""Kronecker factors of the curvature of one affine layer.

The block of the weight is about B (x) A, that of the bias B. Letters: V vectors, N samples, T
positions, I inputs, O outputs. Treatment of positions (Eschenhagen et al. 2023):

    "expand"    A = 1/(N T) sum_nt a a^T,  B = sum_vnt e e^T
    "reduce"    a_n = mean_t a, e_n = sum_t e, then as without positions
    "backpack"  A = 1/N sum_nt a a^T,  B = sum_vn (sum_t e)(sum_t e)^T

"expand" treats positions as samples (frames with separate targets), "reduce" assumes one target for
all positions of a sample, and "backpack" equals the convolutions of BackPACK. With a single
position the three are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.curvature.forms.grad_forms import Inputs
from ngsgd.ops import gemm

SHARINGS = ("expand", "reduce", "backpack")
# Floats of rows that wait for a common product.
_WAITING = 1 << 18
# Floats of input rows that are formed at a time: 16 MB.
_CHUNK = 1 << 22


class Kronecker(NamedTuple):
    """Kronecker factors B (O x O, output side) and A (I x I, input side).

    A is None for a bias, whose curvature is B.

    Example:
        >>> Kronecker(torch.eye(2), torch.ones(1, 1)).dense().shape
        torch.Size([2, 2])
    """

    B_OO: Tensor
    A_II: Tensor | None

    def dense(self) -> Tensor:
        """Return the dense block, in the order of the flattened parameter; for small layers."""
        return self.B_OO if self.A_II is None else torch.kron(self.B_OO.contiguous(), self.A_II.contiguous())


class Gram:
    """Sum of x x^T over blocks of rows, in few large GEMMs; few rows wait for more."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._num_waiting = 0
        self._total_DD: Tensor | None = None

    def add(self, x_XD: Tensor) -> None:
        """Add rows."""
        self._num_waiting += x_XD.shape[0]
        is_many = self._num_waiting >= min(x_XD.shape[1], _WAITING // x_XD.shape[1])
        # A copy, because callers may overwrite the memory.
        self._waiting.append(x_XD if is_many else x_XD.clone())
        if is_many:
            self._multiply()

    def add_sum(self, sum_DD: Tensor) -> None:
        """Add a sum and take over its memory."""
        self._total_DD = sum_DD if self._total_DD is None else self._total_DD.add_(sum_DD)

    def total(self) -> Tensor:
        """Return the sum, D x D, of all rows so far; later rows change it in place."""
        if self._waiting:
            self._multiply()
        assert self._total_DD is not None
        return self._total_DD

    def _multiply(self) -> None:
        x_XD = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        self._waiting.clear()
        self._num_waiting = 0
        keep = 0.0 if self._total_DD is None else 1.0
        self._total_DD = x_XD.new_empty(x_XD.shape[1], x_XD.shape[1]) if self._total_DD is None else self._total_DD
        add_gram(x_XD, self._total_DD, keep)


def output_rows(e_VNTO: Tensor, sharing: str) -> Tensor:
    """Return X x O, the rows whose outer products add up to B."""
    if sharing != "expand" and e_VNTO.shape[2] > 1:
        e_VNTO = e_VNTO.sum(dim=2, keepdim=True)
    if e_VNTO.is_contiguous() or e_VNTO.shape[2] == 1:
        return e_VNTO.flatten(0, 2)
    # Positions of a convolution are in the last dimension of the memory.
    return e_VNTO.permute(3, 0, 1, 2).flatten(1).T


def add_gram(x_XD: Tensor, total_DD: Tensor, keep: float = 1.0, scale: float = 1.0) -> None:
    """Compute total <- keep total + scale x^T x from the blocks on and above the diagonal."""
    if (D := len(total_DD)) < 320:
        gemm.add_mm(total_DD, x_XD.T, x_XD, keep=keep, scale=scale)
        return
    half = D // 2
    add_gram(x_XD[:, :half], total_DD[:half, :half], keep, scale)
    add_gram(x_XD[:, half:], total_DD[half:, half:], keep, scale)
    gemm.add_mm(total_DD[:half, half:], x_XD[:, :half].T, x_XD[:, half:], keep=keep, scale=scale)
    total_DD[half:, :half] = total_DD[:half, half:].T


def add_inputs(total: Gram, inputs: Inputs, sharing: str) -> int:
    """Add a a^T to a sum; return the number of rows."""
    N, T = inputs.num_samples, inputs.num_positions
    num_rows = N * T if sharing == "expand" else N
    size = max(1, _CHUNK // (T * inputs.width))
    for first in range(0, N, size):
        a_NTI = inputs.rows(first, min(first + size, N))
        if sharing == "reduce" and T > 1:
            a_NTI = a_NTI.mean(dim=1, keepdim=True)
        total.add(a_NTI.flatten(0, 1) if a_NTI.shape[0] > 1 else a_NTI[0])
    return num_rows
