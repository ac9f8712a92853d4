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

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.curvature.forms.layer_inputs import Inputs, Patches
from ngsgd.curvature.forms.memory import empty
from ngsgd.ops import gemm

SHARINGS = ("expand", "reduce", "backpack")
# Floats of rows that wait for a common product.
_WAITING = 1 << 18
# Floats of the input of a convolution that are rearranged at a time.
_SLICED = 1 << 20


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
        self._total_DD = empty(x_XD, x_XD.shape[1], x_XD.shape[1]) if self._total_DD is None else self._total_DD
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
    """Return the input moment of a convolution of stride 1, without forming its patches.

    Along the first spatial dimension, kernel position k covers the window [k d, k d + T) of
    positions, with dilation d. Block (k, k + j) is the sum over that window of z_s z_(s + jd)^T,
    whose products depend only on the lag j. Letters: S positions, T of them in the output, K
    kernel positions, W = I / K, C channels, R other kernel positions.
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
    """Yield (start, stop, windows that contain it) of the stretches between ends of windows."""
    ends = sorted({end for start in starts for end in (start, start + length)})
    for start, stop in itertools.pairwise(ends):
        inside = [k for k, first in enumerate(starts) if first <= start and stop <= first + length]
        if inside:
            yield start, stop, inside


def _product(left_WSM: Tensor, right_WSM: Tensor) -> Tensor:
    """Return the sum over positions and samples, W x W."""
    left_WX, right_WX = left_WSM.flatten(1), right_WSM.flatten(1)
    if left_WX.data_ptr() == right_WX.data_ptr():
        total_WW = left_WX.new_empty(len(left_WX), len(left_WX))
        add_gram(left_WX.T, total_WW, 0.0)
        return total_WW
    return gemm.mm(left_WX, right_WX.T)
