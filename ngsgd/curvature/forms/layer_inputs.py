"""Input rows of affine layers, stored or computed on demand.

Letters: N samples, T positions of a sample, I inputs, C channels, K positions of a kernel.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor


class DenseInputs:
    """Stored input rows."""

    def __init__(self, rows_NTI: Tensor) -> None:
        self.rows_NTI = rows_NTI
        self.num_samples, self.num_positions, self.width = rows_NTI.shape
        # of the source of the rows
        self.num_floats = rows_NTI.numel()

    def rows(self, first: int, last: int) -> Tensor:
        """Return n x T x I, of the samples from `first` to before `last`."""
        return self.rows_NTI[first:last]

    def copied(self) -> DenseInputs:
        """Return a copy in separate memory."""
        return DenseInputs(self.rows_NTI.clone())


class Patches:
    """Patches of a convolution, computed on demand; they are K times larger than the input."""

    def __init__(self, x_NC: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
                 padding: Sequence[tuple[int, int]], num_samples: int, mode: str = "constant") -> None:
        self.x_NC = x_NC
        self._padding = [side for pair in reversed(padding) for side in pair]
        self._mode = mode
        self.kernel, self.stride, self.dilation = tuple(kernel), tuple(stride), tuple(dilation)
        self.out = tuple((size + before + after - d * (k - 1) - 1) // s + 1 for size, (before, after), k, s, d
                         in zip(x_NC.shape[2:], padding, kernel, stride, dilation, strict=True))
        self.num_samples = num_samples
        self._per_sample = len(x_NC) // num_samples
        self.num_positions = math.prod(self.out) * self._per_sample
        self.num_channels = x_NC.shape[1]
        self.width = self.num_channels * math.prod(kernel)
        self.num_floats = x_NC.numel()
        # Whether adjacent patches share all but one position of the first spatial dimension.
        self.overlap = self.stride[0] == 1 and self.kernel[0] > 1
        # floats per sample in `slices`
        length = self.out[0] + (self.kernel[0] - 1) * self.dilation[0]
        num_rows = length * math.prod(self.out[1:])
        self.num_sliced = self._per_sample * num_rows * self.width // self.kernel[0]

    def copied(self) -> Patches:
        other = copy.copy(self)
        other.x_NC = self.x_NC.clone()
        return other

    def rows(self, first: int, last: int) -> Tensor:
        view = self._view(first, last, len(self.kernel))
        # Patches of all samples are adjacent in memory, so that rows of samples are rows of one
        # matrix without a copy.
        rows_INT = view.movedim(0, 1 + len(self.kernel)).reshape(self.width, view.shape[0], -1)
        rows_NTI = rows_INT.permute(1, 2, 0)
        return rows_NTI if self._per_sample == 1 else rows_NTI.reshape(-1, self.num_positions, self.width)

    def slices(self, first: int, last: int) -> Tensor:
        """Return patches along all spatial dimensions but the first, W x S x M.

        The S positions of the first dimension (with padding) stay separate. W is a channel and the
        other kernel positions, M a sample and the other output positions.
        """
        # n x C x S x other kernel positions x other output positions
        view = self._view(first, last, len(self.kernel) - 1)
        others = range(3, 3 + len(self.kernel) - 1)
        ordered = view.permute(1, *others, 2, 0, *(i + len(others) for i in others))
        return ordered.reshape(self.width // self.kernel[0], view.shape[2], -1).contiguous()

    def _view(self, first: int, last: int, num_unfolded: int) -> Tensor:
        """Return n x C x other spatial dimensions x kernel and output positions of the last."""
        x = self.x_NC[first * self._per_sample:last * self._per_sample]
        if any(self._padding):
            x = torch.nn.functional.pad(x, self._padding, mode=self._mode)
        num_whole = x.ndim - num_unfolded
        dims = range(len(self.kernel) - num_unfolded, len(self.kernel))
        spatial = x.stride()[2:]
        return x.as_strided((*x.shape[:num_whole], *(self.kernel[i] for i in dims), *(self.out[i] for i in dims)),
                            (*x.stride()[:num_whole], *(spatial[i] * self.dilation[i] for i in dims),
                             *(spatial[i] * self.stride[i] for i in dims)), x.storage_offset())


# input rows of an affine layer
Inputs = DenseInputs | Patches


def joined_inputs(uses: Sequence[Inputs]) -> Inputs:
    """Concatenate the positions of several uses of one weight."""
    return uses[0] if len(uses) == 1 else DenseInputs(torch.cat([inputs.rows(0, inputs.num_samples) for inputs in uses], dim=1))
