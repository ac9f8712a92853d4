"""Input rows of affine layers, and per-sample gradients of one parameter in factored forms.

The gradient of a sample is a sum over the positions at which the sample uses the parameter (frames,
pixels, calls). The summands are outer products for the weight of an affine layer, derivative rows
for a bias or a scale, and derivative rows selected by index for an embedding. Each form provides
squares and norms without forming every per-sample gradient.

Letters: V backpropagated vectors (1: the gradient; C: the columns of a loss Hessian), N samples, T
positions, I inputs, O outputs (D: their number). `weights_VN`: signs of the squares (diagonal of
the Hessian); None: all 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ngsgd.ops import gemm

# Floats of gradients formed at a time: 2 MB fit into the cache.
_CHUNK = 1 << 19


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
        self.width = x_NC.shape[1] * math.prod(kernel)
        self.num_floats = x_NC.numel()

    def copied(self) -> Patches:
        other = copy.copy(self)
        other.x_NC = self.x_NC.clone()
        return other

    def rows(self, first: int, last: int) -> Tensor:
        x = self.x_NC[first * self._per_sample:last * self._per_sample]
        if any(self._padding):
            x = torch.nn.functional.pad(x, self._padding, mode=self._mode)
        spatial = x.stride()[2:]
        # n x C x kernel x output positions
        view = x.as_strided((*x.shape[:2], *self.kernel, *self.out),
                            (*x.stride()[:2], *(step * d for step, d in zip(spatial, self.dilation, strict=True)),
                             *(step * s for step, s in zip(spatial, self.stride, strict=True))), x.storage_offset())
        # Patches of all samples are adjacent in memory, so that rows of samples are rows of one
        # matrix without a copy.
        rows_INT = view.movedim(0, 1 + len(self.kernel)).reshape(self.width, view.shape[0], -1)
        rows_NTI = rows_INT.permute(1, 2, 0)
        return rows_NTI if self._per_sample == 1 else rows_NTI.reshape(-1, self.num_positions, self.width)


# input rows of an affine layer
Inputs = DenseInputs | Patches


def joined_inputs(uses: Sequence[Inputs]) -> Inputs:
    """Concatenate the positions of several uses of one weight."""
    return uses[0] if len(uses) == 1 else DenseInputs(torch.cat([inputs.rows(0, inputs.num_samples) for inputs in uses], dim=1))


class GradForm:
    """Base of the forms; by default the gradients of a few samples are formed at a time."""

    num_samples: int
    num_elements: int
    num_vectors: int

    def individual(self, first: int, last: int) -> Tensor:
        """Return V x n x elements, of the samples from `first` to before `last`."""
        raise NotImplementedError

    def _chunks(self) -> Iterator[tuple[int, int]]:
        size = max(1, _CHUNK // (self.num_vectors * self.num_elements))
        for first in range(0, self.num_samples, size):
            yield first, min(first + size, self.num_samples)

    def _pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (vectors, samples, their gradients) in blocks that fit into the cache."""
        for first, last in self._chunks():
            yield slice(None), slice(first, last), self.individual(first, last)

    def sum_of_squares(self, weights_VN: Tensor | None = None) -> Tensor:
        """Return the sum over vectors and samples of squared elements."""
        return self._moments(weights_VN, gradient=False)[1]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return (sum over samples of the gradients, of their squares) for a single vector."""
        gradient, squares = self._moments(None, gradient=True)
        assert gradient is not None
        return gradient, squares

    def _moments(self, weights_VN: Tensor | None, *, gradient: bool) -> tuple[Tensor | None, Tensor]:
        total: Tensor | None = None
        squares: Tensor | None = None
        for vectors, samples, g_VNP in self._pieces():
            if squares is None:
                squares = g_VNP.new_zeros(self.num_elements)
                total = torch.zeros_like(squares) if gradient else None
            if total is not None:
                total.add_(g_VNP[0, 0] if g_VNP.shape[1] == 1 else g_VNP.sum(dim=(0, 1)))
            weights = None if weights_VN is None else weights_VN[vectors, samples]
            _add_squares(squares.expand(g_VNP.shape[1], -1), g_VNP, weights)
        assert squares is not None
        return total, squares

    def squares_by_sample(self, weights_VN: Tensor | None = None) -> Tensor:
        """Return the sum over vectors of squared elements, N x elements."""
        squares_NP: Tensor | None = None
        for vectors, samples, g_VNP in self._pieces():
            if squares_NP is None:
                squares_NP = g_VNP.new_zeros(self.num_samples, self.num_elements)
            weights = None if weights_VN is None else weights_VN[vectors, samples]
            _add_squares(squares_NP[samples], g_VNP, weights)
        assert squares_NP is not None
        return squares_NP

    def squared_norms(self) -> Tensor:
        """Return V x N squared norms."""
        return torch.cat([_squared_norms(self.individual(*chunk)) for chunk in self._chunks()], dim=1)


def _weighted(x_VN: Tensor, weights_VN: Tensor | None) -> Tensor:
    if weights_VN is not None:
        x_VN = x_VN * weights_VN.view(*x_VN.shape[:2], *[1] * (x_VN.ndim - 2))
    return x_VN[0] if len(x_VN) == 1 else x_VN.sum(dim=0)


def _squared_norms(x: Tensor) -> Tensor:
    """Return squared norms of the last dimension, without a temporary for the squares."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms.square_()


def _add_squares(squares_NP: Tensor, g_VNP: Tensor, weights_VN: Tensor | None) -> None:
    """Add the squares of all vectors to each sample; samples may share memory (stride 0)."""
    # Long rows: one pass over each, which fits into the cache.
    if weights_VN is None and g_VNP.shape[2] >= 4096:
        for g_NP in g_VNP:
            for squares_P, g_P in zip(squares_NP, g_NP, strict=True):
                squares_P.addcmul_(g_P, g_P)
        return
    added_NP = _weighted(g_VNP.square(), weights_VN)
    if squares_NP.stride(0) == 0:
        squares_NP[0].add_(added_NP.sum(dim=0))
    else:
        squares_NP.add_(added_NP)


class OuterProduct(GradForm):
    """Weight of an affine layer: the sum over positions of e a^T, per group."""

    def __init__(self, inputs: Inputs, e_VNTO: Tensor, groups: int = 1) -> None:
        self.inputs, self.e_VNTO, self.groups = inputs, e_VNTO, groups
        self.num_vectors, self.num_samples = e_VNTO.shape[:2]
        self.num_elements = e_VNTO.shape[3] * (inputs.width // groups)

    def individual(self, first: int, last: int) -> Tensor:
        a_NTI, e_VNTO = self.inputs.rows(first, last), self.e_VNTO[:, first:last]
        V, N, T, D = e_VNTO.shape
        if (G := self.groups) > 1:
            a_NTI = a_NTI.unflatten(2, (G, -1)).movedim(2, 1).flatten(0, 1)
            e_VNTO = e_VNTO.unflatten(3, (G, -1)).movedim(3, 2).flatten(1, 2)
        if T == 1:
            g_VNOI = e_VNTO.new_empty(V, len(a_NTI), e_VNTO.shape[3], a_NTI.shape[2])
            return torch.mul(e_VNTO[:, :, 0, :, None], a_NTI[:, 0, None, :], out=g_VNOI).view(V, N, -1)
        if V == 1:
            g_NOI = e_VNTO.new_empty(len(a_NTI), e_VNTO.shape[3], a_NTI.shape[2])
            return torch.bmm(e_VNTO[0].transpose(1, 2), a_NTI, out=g_NOI).view(1, N, -1)
        e_NOT = e_VNTO.permute(1, 0, 3, 2).reshape(N * G, V * D // G, T)
        g_NVP = torch.bmm(e_NOT, a_NTI).view(N, G, V, -1)
        return g_NVP.movedim(2, 0).reshape(V, N, -1)

    def _pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        V = self.num_vectors
        if V * self.num_elements <= _CHUNK or self.groups > 1:
            yield from super()._pieces()
            return
        size = max(1, _CHUNK // self.num_elements)
        for n in range(self.num_samples):
            # Patches are formed once per sample.
            a_TI, e_VOT = self.inputs.rows(n, n + 1)[0], self.e_VNTO[:, n].transpose(1, 2)
            for first in range(0, V, size):
                e_XT = e_VOT[first:first + size].flatten(0, 1)
                yield slice(first, first + size), slice(n, n + 1), torch.mm(e_XT, a_TI).view(-1, 1, self.num_elements)

    @property
    def is_rank_one(self) -> bool:
        return self.inputs.num_positions == 1 and self.groups == 1

    def _squared_rows(self, weights_VN: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (N x O, N x I), whose outer products are the squares for one position."""
        return _weighted(self.e_VNTO[:, :, 0].square(), weights_VN), self.inputs.rows(0, self.num_samples)[:, 0].square()

    def _moments(self, weights_VN: Tensor | None, *, gradient: bool) -> tuple[Tensor | None, Tensor]:
        if not self.is_rank_one:
            return super()._moments(weights_VN, gradient=gradient)
        e2_NO, a2_NI = self._squared_rows(weights_VN)
        total = (self.e_VNTO.sum(dim=0)[:, 0].T @ self.inputs.rows(0, self.num_samples)[:, 0]).flatten() if gradient else None
        squares_OI = e2_NO.new_empty(e2_NO.shape[1], a2_NI.shape[1])
        return total, gemm.mm(e2_NO.T, a2_NI, out=squares_OI).flatten()

    def squares_by_sample(self, weights_VN: Tensor | None = None) -> Tensor:
        if not self.is_rank_one:
            return super().squares_by_sample(weights_VN)
        e2_NO, a2_NI = self._squared_rows(weights_VN)
        squares_NOI = e2_NO.new_empty(*e2_NO.shape, a2_NI.shape[1])
        return torch.mul(e2_NO[:, :, None], a2_NI[:, None, :], out=squares_NOI).flatten(1)

    def squared_norms(self) -> Tensor:
        V, N, T, D = self.e_VNTO.shape
        if self.is_rank_one:
            return _squared_norms(self.e_VNTO[:, :, 0]) * _squared_norms(self.inputs.rows(0, N)[:, 0])
        if self.groups > 1 or V > 1 or T * (self.inputs.width + D) > self.inputs.width * D:
            return super().squared_norms()
        # |sum_t e_t a_t^T|^2 = sum_tu (e_t e_u)(a_t a_u)
        norms = []
        size = max(1, _CHUNK // (T * max(T, self.inputs.width)))
        for first in range(0, N, size):
            a_NTI, e_NTO = self.inputs.rows(first, first + size), self.e_VNTO[0, first:first + size]
            norms.append(torch.linalg.vecdot(torch.bmm(e_NTO, e_NTO.transpose(1, 2)).flatten(1),
                                             torch.bmm(a_NTI, a_NTI.transpose(1, 2)).flatten(1)))
        return torch.cat(norms)[None]


class RowSum(GradForm):
    """Bias, or scale with rows of derivative times normalized input: the sum over positions."""

    def __init__(self, e_VNTO: Tensor) -> None:
        self.e_VNTO = e_VNTO
        self.num_vectors, self.num_samples, _, self.num_elements = e_VNTO.shape

    def individual(self, first: int, last: int) -> Tensor:
        e_VNTO = self.e_VNTO[:, first:last]
        return e_VNTO[:, :, 0] if e_VNTO.shape[2] == 1 else e_VNTO.sum(dim=2)

    def squares_by_sample(self, weights_VN: Tensor | None = None) -> Tensor:
        return _weighted(self.individual(0, self.num_samples).square(), weights_VN)


class EmbeddingGrad(GradForm):
    """Embedding: derivative rows added to the selected rows of the table."""

    def __init__(self, index_NT: Tensor, e_VNTO: Tensor, num_rows: int) -> None:
        self.index_NT, self.e_VNTO, self.num_rows = index_NT, e_VNTO, num_rows
        self.num_vectors, self.num_samples = e_VNTO.shape[:2]
        self.num_elements = num_rows * e_VNTO.shape[3]

    def individual(self, first: int, last: int) -> Tensor:
        e_VNTO, index_NT = self.e_VNTO[:, first:last], self.index_NT[first:last]
        V, N, T, D = e_VNTO.shape
        table = e_VNTO.new_zeros(V, N * self.num_rows, D)
        offset_N1 = torch.arange(N, device=index_NT.device)[:, None] * self.num_rows
        return table.index_add_(1, (index_NT + offset_N1).flatten(), e_VNTO.reshape(V, N * T, D)).view(V, N, -1)


class TiedGrad(GradForm):
    """Parameter that several layers use in different ways (a tied embedding): sum of its forms."""

    def __init__(self, shares: Sequence[GradForm]) -> None:
        self.shares = shares
        self.num_samples, self.num_elements = shares[0].num_samples, shares[0].num_elements
        self.num_vectors = shares[0].num_vectors

    def individual(self, first: int, last: int) -> Tensor:
        total = self.shares[0].individual(first, last)
        for share in self.shares[1:]:
            total = total + share.individual(first, last)
        return total


class DenseGrad(GradForm):
    """Gradients that are already formed."""

    def __init__(self, g_VNP: Tensor) -> None:
        self.g_VNP = g_VNP
        self.num_vectors, self.num_samples, self.num_elements = g_VNP.shape

    def individual(self, first: int, last: int) -> Tensor:
        return self.g_VNP[:, first:last]

    def squares_by_sample(self, weights_VN: Tensor | None = None) -> Tensor:
        return _weighted(self.g_VNP.square(), weights_VN)


def joined(shares: Sequence[OuterProduct | RowSum | EmbeddingGrad]) -> OuterProduct | RowSum | EmbeddingGrad | TiedGrad:
    """Join the uses of one parameter in one pass, position by position: squares follow the sum."""
    first = shares[0]
    if len(shares) == 1:
        return first
    if len({type(share) for share in shares}) > 1 or len({getattr(share, "groups", 1) for share in shares}) > 1:
        return TiedGrad(shares)
    e_VNTO = torch.cat([share.e_VNTO for share in shares], dim=2)
    if isinstance(first, OuterProduct):
        inputs = joined_inputs([share.inputs for share in shares if isinstance(share, OuterProduct)])
        return OuterProduct(inputs, e_VNTO, first.groups)
    if isinstance(first, EmbeddingGrad):
        index_NT = torch.cat([share.index_NT for share in shares if isinstance(share, EmbeddingGrad)], dim=1)
        return EmbeddingGrad(index_NT, e_VNTO, first.num_rows)
    return RowSum(e_VNTO)
