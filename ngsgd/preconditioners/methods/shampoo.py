"""Preconditioners of each tensor dimension, from gradients only.

    Shampoo   G x_1 L_1^(-1/(2 k)) .. x_k L_k^(-1/(2 k)),  L_i = mean of G_(i) G_(i)^T over steps
    SOAP      Q [m / (sqrt(v) + d)] with eigenvectors Q of the L_i and Adam's moments of Q^T g

Large tensors are split into blocks, and small adjacent dimensions are merged (channels and taps).

Letters: k dimensions of a block, D size of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from ngsgd.ops import gemm
from ngsgd.ops.linalg import eigh, inverse_root
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.factored_grad import FactoredGrad
from ngsgd.preconditioners.states import GROUPS, Layout, State

# Rounding noise of a norm, in units of the last place.
_ROUNDING = 8.0


class _BlockMethod(Preconditioner):
    """Base of Shampoo and SOAP: a factor for each dimension of each block of a tensor."""

    block_size: int = 1024

    def _factor_shapes(self, name: str) -> dict[str, tuple[int, int]]:
        return {f"{index}.{k}": (length, length) for index, shape in enumerate(self._block_shapes(name))
                for k, length in enumerate(shape)}

    def _block_shapes(self, name: str) -> list[torch.Size]:
        return [block.shape for block in self._parts(torch.empty(self.blocks.shape(name), device="meta"))]

    def measure(self, name: str, g: Tensor) -> State:
        factors = {}
        for index, block in enumerate(self._parts(g)):
            for k in range(block.ndim):
                G_DX = block.movedim(k, 0).reshape(block.shape[k], -1)
                factors[f"{index}.{k}"] = gemm.mm(G_DX, G_DX.T)
        return factors

    @staticmethod
    def _rotated(block: Tensor, index: int, inverse: State, *, transpose: bool) -> Tensor:
        """Multiply every dimension of the block by its matrix, if any, or its transpose."""
        if f"{index}.0" not in inverse:
            return block
        if block.ndim == 2:
            left_OO, right_II = (inverse[f"{index}.{k}"].T if transpose else inverse[f"{index}.{k}"] for k in range(2))
            return gemm.mm(gemm.mm(left_OO, block), right_II.T)
        for k in range(block.ndim):
            block = torch.tensordot(inverse[f"{index}.{k}"], block, dims=([0 if transpose else 1], [k])).movedim(0, k)
        return block

    def _parts(self, g: Tensor) -> Iterator[Tensor]:
        return self._views(_merged(g, self.block_size))

    def _views(self, merged: Tensor) -> Iterator[Tensor]:
        return (merged[corner] for corner in _corners(merged.shape, self.block_size))


class Shampoo(_BlockMethod, kind="shampoo"):
    """Shampoo (Gupta et al. 2018, algorithm 2); for a bias, full-matrix AdaGrad.

    Args:
        damping: relative to the largest eigenvalue of a factor. Default 1e-6.
        history: accumulation of G G^T: "average" with ema_decay (default), or "sum" of all steps,
            as in the paper.
        block_size: largest dimension of a factor. Default 1024.
        options: see `Preconditioner`.
    """

    damping: float = 1e-6
    history: str = "average"

    def average_in(self, name: str, new: State) -> None:
        # Zero gradients start no estimate: the root of their factors would be arbitrarily large.
        if name not in self.statistics and not any(bool(value.any()) for value in new.values()):
            return
        if self.history == "average":
            super().average_in(name, new)
        elif all(bool(value.isfinite().all()) for value in new.values()):
            self.statistics.weights[name] = 1.0
            known = self.statistics.setdefault(name, {key: torch.zeros_like(value) for key, value in new.items()})
            torch._foreach_add_([known[key] for key in new], list(new.values()))
        else:
            self.note_skipped()

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return {f"{group}.{key}": shape for group in GROUPS for key, shape in self._factor_shapes(name).items()}

    def invert(self, name: str, known: State) -> State:
        order = 1 + max(int(key.rpartition(".")[2]) for key in known)
        # A block with zero gradients waits for the next update; no value is read on the host.
        return {key: torch.where(L_DD.any(), inverse_root(L_DD, 2 * order, self.option(name, "damping")), 0.0)
                for key, L_DD in known.items()}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in grads if name not in self.inverses]:
            # The first gradient of a tensor that is not zero, between two updates.
            self.average_in(name, self.measure(name, grads[name]))
            if name in self.statistics:
                self.inverses[name] = self.inverted(name, self.mean_statistics(name))
        return super().apply(grads)

    def direction(self, name: str, inverse: State, g: Tensor) -> Tensor:
        found = torch.empty_like(_merged(g, self.block_size))
        for index, (block, out) in enumerate(zip(self._parts(g), self._views(found), strict=True)):
            out.copy_(self._rotated(block, index, inverse, transpose=False))
        return found.view_as(g)

    def can_hold(self, name: str, inverse: State) -> bool:
        # True for a matrix that was not merged into a vector.
        return "0.1" in inverse

    def direction_of_rows(self, name: str, inverse: State, rows: FactoredGrad) -> tuple[Tensor, Tensor | None]:
        shape = rows.e_XO.shape[1], rows.a_XI.shape[1]
        found = rows.e_XO.new_empty(shape)
        corners = list(_corners(shape, self.block_size))
        for index, ((outputs, inputs), out) in enumerate(zip(corners, self._views(found), strict=True)):
            part = FactoredGrad(rows.a_XI[:, inputs], rows.e_XO[:, outputs], has_bias=False)
            out.copy_(part.preconditioned(inverse[f"{index}.0"], inverse[f"{index}.1"])[0])
        return found, None


class SOAP(_BlockMethod, kind="soap"):
    """Adam in the eigenbasis of Shampoo's L_i (Vyas et al. 2024, algorithm 3); vectors use Adam.

    The first gradient of a tensor initializes the L_i, and its direction is 0. The moments change
    at every step, the L_i by curvature_interval, and the basis by inverse_interval: a power
    iteration and a QR decomposition, with m rotated. Use momentum 0 in the optimizer.

    Args:
        damping: eps, added to sqrt(v). Default 1e-8.
        ema_decay: beta 2, decay of v and of the L_i. Default 0.95.
        momentum: beta 1, decay of the gradient average, in [0, 1). Default 0.95.
        block_size: largest dimension of a factor. Default 1024.
        options: see `Preconditioner`.
    """

    damping: float = 1e-8
    momentum: float = 0.95

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        factors = self._factor_shapes(name) if len(self.blocks.shape(name)) > 1 else {}
        moments = {f"inverse.{index}.{key}": shape for index, shape in enumerate(self._block_shapes(name)) for key in ("m", "v")}
        return {**{f"{group}.{key}": shape for group in GROUPS for key, shape in factors.items()}, **moments,
                "inverse.weight_m": (), "inverse.weight_v": ()}

    def measure(self, name: str, g: Tensor) -> State:
        # Square the first gradient in float64, for the digits that determine the first basis.
        return super().measure(name, g if name in self.inverses else g.double()) if g.ndim > 1 else {}

    def average_in(self, name: str, new: State) -> None:
        if new:
            super().average_in(name, new)
        else:
            # A vector has no factors.
            self.statistics.put(name, {})

    def refresh(self) -> None:
        begun = [name for name in self.statistics if name not in self.inverses]
        super().refresh()
        for name in begun:
            own = self.inverses[name]["weight_m"].dtype
            self.statistics[name] = {key: L_DD.to(own) for key, L_DD in self.statistics[name].items()}

    def invert(self, name: str, known: State) -> State:
        if (old := self.inverses.get(name)) is None:
            # the first basis and zero moments
            p = self.value_of(name)
            moments = {f"{index}.{key}": torch.zeros_like(block)
                       for index, block in enumerate(self._parts(p)) for key in ("m", "v")}
            return {**{key: _eigenvectors(L_DD, p.dtype) for key, L_DD in known.items()}, **moments,
                    "weight_m": p.new_zeros(()), "weight_v": p.new_zeros(())}
        # one power iteration
        found = dict(old)
        for key, L_DD in known.items():
            index, _, k = key.partition(".")
            Q_DD = old[key]
            LQ_DD = gemm.mm(L_DD, Q_DD)
            # The shift keeps columns in the null space of L, whose image is rounding noise.
            LQ_DD.add_(Q_DD * _noise(L_DD.norm()))
            order_D = (Q_DD * LQ_DD).sum(dim=0).argsort(descending=True, stable=True)
            found[key] = torch.linalg.qr(LQ_DD[:, order_D])[0]
            turn_DD = gemm.mm(found[key].T, Q_DD)
            found[f"{index}.m"] = torch.tensordot(turn_DD, found[f"{index}.m"], dims=([1], [int(k)])).movedim(0, int(k))
            found[f"{index}.v"] = found[f"{index}.v"].index_select(int(k), order_D)
        return found

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, g in grads.items():
            # Averaged over workers, whose bases have no mean.
            if name not in self.inverses and self.statistics.get(name):
                self.inverses[name] = self.inverted(name, self.mean_statistics(name))
            if name in self.inverses:
                found[name] = self._adam(self.inverses[name], g, self.option(name, "ema_decay"), self.option(name, "damping"))
            else:
                # Not zeros, so that a non-finite gradient stays non-finite.
                found[name] = g * 0.0
                # Update the curvature in this step, whatever the interval.
                self.renew()
        return found

    def _adam(self, inverse: State, g: Tensor, beta_2: float, damping: float) -> Tensor:
        """Return the direction; a non-finite gradient changes no moments, without a host sync."""
        # Then the squares of all coordinates are finite, too.
        is_finite = torch.linalg.vector_norm(g).isfinite()
        share_m, share_v = is_finite * g.new_full((), 1.0 - self.momentum), is_finite * g.new_full((), 1.0 - beta_2)
        for key, share in (("weight_m", share_m), ("weight_v", share_v)):
            inverse[key].lerp_(torch.ones_like(share), share)
        found = torch.empty_like(_merged(g, self.block_size))
        for index, (block, out) in enumerate(zip(self._parts(torch.where(is_finite, g, 0.0)), self._views(found), strict=True)):
            own, m, v = self._rotated(block, index, inverse, transpose=True), inverse[f"{index}.m"], inverse[f"{index}.v"]
            m.lerp_(own, share_m)
            v.lerp_(own.square(), share_v)
            root = (v / inverse["weight_v"]).sqrt_()
            # Rounding noise of a rotation must not count as a gradient.
            root.add_(damping + _noise(root.norm()))
            out.copy_(self._rotated(m / inverse["weight_m"] / root, index, inverse, transpose=False))
        return torch.where(is_finite, found.view_as(g), g)


def _noise(norm: Tensor) -> Tensor:
    return norm * (_ROUNDING * torch.finfo(norm.dtype).eps)


def _eigenvectors(L_DD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return eigenvectors as columns, in descending order; the null space is deterministic."""
    values_D, U_DD = eigh(L_DD.double())
    null = values_D <= values_D.norm() * max((_ROUNDING * torch.finfo(dtype).eps) ** 2, _ROUNDING * torch.finfo(torch.float64).eps)
    N_DK = U_DD[:, null]
    numbers_D1 = torch.arange(len(U_DD), dtype=torch.float64, device=U_DD.device)[:, None]
    N_DK = N_DK @ eigh(N_DK.T @ (numbers_D1 * N_DK))[1] if null.any() else N_DK
    return torch.cat([N_DK, U_DD[:, ~null]], dim=1).flip(1).to(dtype)


def _corners(shape: Sequence[int], size: int) -> Iterator[tuple[slice, ...]]:
    for corner in product(*(range(0, length, size) for length in shape)):
        yield tuple(slice(first, first + size) for first in corner)


def _merged(g: Tensor, size: int) -> Tensor:
    """Drop dimensions of size 1, and merge adjacent ones up to the block size."""
    shape: list[int] = []
    for length in g.shape:
        if shape and shape[-1] * length <= size and (len(shape) > 1 or length == 1 or shape[-1] == 1):
            shape[-1] *= length
        else:
            shape.append(length)
    return g.reshape(shape or [1])
