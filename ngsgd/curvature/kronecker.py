"""Kronecker factors of one affine layer's curvature: the block of its weight is about B (x) A, that of its bias B.

Letters: V vectors, N samples, T positions, I inputs, O outputs.  How positions enter (Eschenhagen et al. 2023):

    "expand"    A = 1/(N T) sum_nt a a^T,  B = sum_vnt e e^T         positions as samples: frames with targets of their own
    "reduce"    a_n = mean_t a, e_n = sum_t e, then as without positions     one target for all positions of a sample
    "backpack"  A = 1/N sum_nt a a^T,  B = sum_vn (sum_t e)(sum_t e)^T       the convolutions of BackPACK

With a single position the three are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.curvature.rows import Inputs

SHARINGS = ("expand", "reduce", "backpack")


class Kronecker(NamedTuple):
    """B (O x O, output side) and A (I x I, input side; None for a bias, whose curvature is B alone)."""

    B_OO: Tensor
    A_II: Tensor | None

    def dense(self) -> Tensor:
        """The block itself, in the order of the flattened parameter; for small layers."""
        return self.B_OO if self.A_II is None else torch.kron(self.B_OO.contiguous(), self.A_II.contiguous())


class Gram:
    """The sum of x x^T over rows that come in blocks, as few large products."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._num_waiting = 0
        self._total_DD: Tensor | None = None

    def add(self, x_XD: Tensor) -> None:
        """Takes rows in; they wait as long as they are smaller than their sum."""
        self._waiting.append(x_XD)
        self._num_waiting += x_XD.shape[0]
        if self._num_waiting >= x_XD.shape[1]:
            self._multiply()

    def total(self) -> Tensor:
        """D x D of all rows so far."""
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
    """X x O, the rows whose outer products add up to B."""
    if sharing != "expand" and e_VNTO.shape[2] > 1:
        e_VNTO = e_VNTO.sum(dim=2, keepdim=True)
    if e_VNTO.is_contiguous() or e_VNTO.shape[2] == 1:
        return e_VNTO.flatten(0, 2)
    return e_VNTO.permute(3, 0, 1, 2).flatten(1).T  # the positions of a convolution are in the last dimension of the memory


def add_gram(x_XD: Tensor, total_DD: Tensor, keep: float = 1.0, scale: float = 1.0) -> None:
    """total <- keep total + scale x^T x; of the symmetric matrix only blocks on and above the diagonal are multiplied out."""
    D = len(total_DD)
    if D < 320:
        torch.addmm(total_DD, x_XD.T, x_XD, beta=keep, alpha=scale, out=total_DD)
        return
    half = D // 2
    add_gram(x_XD[:, :half], total_DD[:half, :half], keep, scale)
    add_gram(x_XD[:, half:], total_DD[half:, half:], keep, scale)
    torch.addmm(total_DD[:half, half:], x_XD[:, :half].T, x_XD[:, half:], beta=keep, alpha=scale, out=total_DD[:half, half:])
    total_DD[half:, :half] = total_DD[:half, half:].T


def input_moment(inputs: Inputs, sharing: str) -> tuple[Tensor, int]:
    """(sum of a a^T, number of rows that it counts); A is their quotient."""
    N, T = inputs.num_samples, inputs.num_positions
    total = Gram()
    size = max(1, (1 << 20) // (T * inputs.width))
    for first in range(0, N, size):
        a_NTI = inputs.rows(first, min(first + size, N))
        if sharing == "reduce" and T > 1:
            a_NTI = a_NTI.mean(dim=1, keepdim=True)
        total.add(a_NTI.flatten(0, 1) if a_NTI.shape[0] > 1 else a_NTI[0])
    return total.total(), N * T if sharing == "expand" else N
