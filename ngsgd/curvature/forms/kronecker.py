"""Kronecker factors of one affine layer's curvature: the block of its weight is about B (x) A, that of its bias B.

Letters: V vectors, N samples, T positions, I inputs, O outputs.  How positions enter (Eschenhagen et al. 2023):

    "expand"    A = 1/(N T) sum_nt a a^T,  B = sum_vnt e e^T         positions as samples: frames with targets of their own
    "reduce"    a_n = mean_t a, e_n = sum_t e, then as without positions     one target for all positions of a sample
    "backpack"  A = 1/N sum_nt a a^T,  B = sum_vn (sum_t e)(sum_t e)^T       the convolutions of BackPACK

With a single position the three are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.curvature.forms.layer_inputs import Inputs, Patches
from ngsgd.curvature.forms.memory import empty
from ngsgd.ops import gemm

SHARINGS = ("expand", "reduce", "backpack")
# floats of rows that wait to be multiplied out together
_WAITING = 1 << 18
# floats of a convolution's inputs that are laid out anew at a time
_SLICED = 1 << 20


class Kronecker(NamedTuple):
    """B (O x O, output side) and A (I x I, input side; None for a bias, whose curvature is B alone)."""

    B_OO: Tensor
    A_II: Tensor | None

    def dense(self) -> Tensor:
        """The block itself, in the order of the flattened parameter; for small layers."""
        return self.B_OO if self.A_II is None else torch.kron(self.B_OO.contiguous(), self.A_II.contiguous())


class Gram:
    """The sum of x x^T over rows that come in blocks, as few large products, and none before it must be made.

    Rows that wait are far smaller than their sum; so an output layer's, of a minibatch smaller than its input, wait for the end of
    the backward pass, whose memory is free by then.
    """

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._num_waiting = 0
        self._total_DD: Tensor | None = None

    def add(self, x_XD: Tensor) -> None:
        """Takes rows in."""
        self._num_waiting += x_XD.shape[0]
        is_many = self._num_waiting >= min(x_XD.shape[1], _WAITING // x_XD.shape[1])
        # for they may be of memory that is written again
        self._waiting.append(x_XD if is_many else x_XD.clone())
        if is_many:
            self._multiply()

    def add_sum(self, sum_DD: Tensor) -> None:
        """Takes a sum in, which becomes this one's."""
        self._total_DD = sum_DD if self._total_DD is None else self._total_DD.add_(sum_DD)

    def total(self) -> Tensor:
        """D x D of all rows so far; more rows change it."""
        if self._waiting:
            self._multiply()
        assert self._total_DD is not None
        return self._total_DD

    def _multiply(self) -> None:
        x_XD = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        self._waiting.clear()
        self._num_waiting = 0
        keep = 0.0 if self._total_DD is None else 1.0
        self._total_DD = empty(x_XD, x_XD.shape[1], x_XD.shape[1]) if self._total_DD is None else self._total_DD
        add_gram(x_XD, self._total_DD, keep)


def output_rows(e_VNTO: Tensor, sharing: str) -> Tensor:
    """X x O, the rows whose outer products add up to B."""
    if sharing != "expand" and e_VNTO.shape[2] > 1:
        e_VNTO = e_VNTO.sum(dim=2, keepdim=True)
    if e_VNTO.is_contiguous() or e_VNTO.shape[2] == 1:
        return e_VNTO.flatten(0, 2)
    # the positions of a convolution are in the last dimension of the memory
    return e_VNTO.permute(3, 0, 1, 2).flatten(1).T


def add_gram(x_XD: Tensor, total_DD: Tensor, keep: float = 1.0, scale: float = 1.0) -> None:
    """total <- keep total + scale x^T x; of the symmetric matrix only blocks on and above the diagonal are multiplied out."""
    D = len(total_DD)
    if D < 320:
        gemm.add_mm(total_DD, x_XD.T, x_XD, keep=keep, scale=scale)
        return
    half = D // 2
    add_gram(x_XD[:, :half], total_DD[:half, :half], keep, scale)
    add_gram(x_XD[:, half:], total_DD[half:, half:], keep, scale)
    gemm.add_mm(total_DD[:half, half:], x_XD[:, :half].T, x_XD[:, half:], keep=keep, scale=scale)
    total_DD[half:, :half] = total_DD[:half, half:].T


def input_moment(inputs: Inputs, sharing: str) -> tuple[Tensor, int]:
    """(sum of a a^T, number of rows that it counts); A is their quotient."""
    total = Gram()
    num_rows = add_inputs(total, inputs, sharing)
    return total.total(), num_rows


def add_inputs(total: Gram, inputs: Inputs, sharing: str) -> int:
    """Adds a a^T to a sum; the number of rows that it counts."""
    N, T = inputs.num_samples, inputs.num_positions
    num_rows = N * T if sharing == "expand" else N
    if sharing != "reduce" and isinstance(inputs, Patches) and inputs.overlap:
        total.add_sum(_overlapping_moment(inputs))
        return num_rows
    size = max(1, (1 << 20) // (T * inputs.width))
    for first in range(0, N, size):
        a_NTI = inputs.rows(first, min(first + size, N))
        if sharing == "reduce" and T > 1:
            a_NTI = a_NTI.mean(dim=1, keepdim=True)
        total.add(a_NTI.flatten(0, 1) if a_NTI.shape[0] > 1 else a_NTI[0])
    return num_rows


def _overlapping_moment(inputs: Patches) -> Tensor:
    """The same of a convolution of stride 1, without its patches.

    Along the first spatial dimension kernel position k sees the window [k d, k d + T) of positions, d the dilation, so the block
    (k, k + j) of the moment is the sum over that window of z_s z_(s + j d)^T: products depend on the lag j alone and are made once
    for each stretch between the ends of windows.  For a kernel of 3 in one dimension that is 3 T and a bit in place of 6 T.

    Letters: S positions, T of them in the output, K kernel positions, W = I / K, C channels, R other kernel positions.
    """
    K, d, T = inputs.kernel[0], inputs.dilation[0], inputs.out[0]
    C, W = inputs.num_channels, inputs.width // K
    total_II = empty(inputs.x_NC, inputs.width, inputs.width)
    total_CKRCKR = total_II.view(C, K, W // C, C, K, W // C)
    size = max(1, _SLICED // inputs.num_sliced)
    for lag in range(K):
        blocks_KWW = total_II.new_zeros(K - lag, W, W)
        for first in range(0, inputs.num_samples, size):
            z_WSM = inputs.slices(first, min(first + size, inputs.num_samples))
            for start, stop, windows in _stretches([k * d for k in range(K - lag)], T):
                product_WW = _product(z_WSM[:, start:stop], z_WSM[:, start + lag * d:stop + lag * d])
                for k in windows:
                    blocks_KWW[k] += product_WW
        for k, block_CRCR in enumerate(blocks_KWW.view(K - lag, C, W // C, C, W // C)):
            total_CKRCKR[:, k, :, :, k + lag] = block_CRCR
            if lag:
                total_CKRCKR[:, k + lag, :, :, k] = block_CRCR.permute(2, 3, 0, 1)
    return total_II


def _stretches(starts: list[int], length: int) -> Iterator[tuple[int, int, list[int]]]:
    """(start, stop, the windows that contain it) of the stretches between starts and ends of windows of one length."""
    ends = sorted({end for start in starts for end in (start, start + length)})
    for start, stop in itertools.pairwise(ends):
        inside = [k for k, first in enumerate(starts) if first <= start and stop <= first + length]
        if inside:
            yield start, stop, inside


def _product(left_WSM: Tensor, right_WSM: Tensor) -> Tensor:
    """W x W: the sum over positions and samples."""
    left_WX, right_WX = left_WSM.flatten(1), right_WSM.flatten(1)
    if left_WX.data_ptr() == right_WX.data_ptr():
        total_WW = left_WX.new_empty(len(left_WX), len(left_WX))
        add_gram(left_WX.T, total_WW, 0.0)
        return total_WW
    return gemm.mm(left_WX, right_WX.T)
