"""Preconditioners of each tensor's dimensions, from gradients alone.

    Shampoo   G x_1 L_1^(-1/(2 k)) .. x_k L_k^(-1/(2 k)),  L_i = mean of G_(i) G_(i)^T over steps    Gupta et al. 2018, algorithm 2
    SOAP      Q [m / (sqrt(v) + d)] in the eigenvectors Q of the L_i, m and v Adam's moments of Q^T g  Vyas et al. 2024, algorithm 3

Large tensors are cut into blocks, small adjacent dimensions are merged (a convolution's channels and taps).  The damping of Shampoo
is relative to the largest eigenvalue of each L_i.

Letters: k dimensions of a block, D size of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from ngsgd.curvature.layers import upcast
from ngsgd.ops import gemm
from ngsgd.ops.linalg import eigh, inverse_root, inverse_root_newton
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.factored_grad import FactoredGrad
from ngsgd.preconditioners.options import Options
from ngsgd.preconditioners.states import State


@dataclass(frozen=True)
class BlockOptions(Options):
    """Of both."""

    # largest dimension of a factor
    block_size: int = 1024

    def problems(self) -> list[str]:
        found = super().problems()
        return found if self.block_size >= 1 else [*found, f"block_size is {self.block_size}; it must be at least 1."]


@dataclass(frozen=True)
class ShampooOptions(BlockOptions):
    """Of Shampoo."""

    # times the largest eigenvalue of a factor
    damping: float = 1e-6
    # of G G^T: "average" with ema_decay, or "sum" of all steps, as in the paper
    history: str = "average"
    # "eigen", or "newton": products only, quicker on GPUs
    root_method: str = "eigen"

    def problems(self) -> list[str]:
        found = super().problems()
        found += [f"{name} is {value!r}; choose {', '.join(known)}." for name, value, known
                  in (("history", self.history, ("average", "sum")), ("root_method", self.root_method, ("eigen", "newton")))
                  if value not in known]
        return found


class Shampoo(Preconditioner):
    """Shampoo; a bias is a tensor of one dimension, and with it full-matrix AdaGrad."""

    Options: ClassVar[type[BlockOptions]] = ShampooOptions
    joins_bias = False   # tensors stay apart
    splits_work = True
    agrees_over_ranks = True

    def measure_gradient(self, name: str, g: Tensor) -> State:
        factors = {}
        for index, block in enumerate(self._blocks(g)):
            for k in range(block.ndim):
                G_DX = block.movedim(k, 0).reshape(block.shape[k], -1)
                factors[f"{index}.{k}"] = gemm.mm(G_DX, G_DX.T)
        return factors

    def _average(self, name: str, new: State) -> None:
        if self.options.history == "average":
            super()._average(name, new)
        elif all(bool(value.isfinite().all()) for value in new.values()):
            self.weights[name] = 1.0
            known = self.statistics.setdefault(name, {key: torch.zeros_like(value) for key, value in new.items()})
            torch._foreach_add_([known[key] for key in new], list(new.values()))
        else:
            self.num_skipped += 1

    def invert(self, name: str, known: State) -> State:
        find = inverse_root if self.options.root_method == "eigen" else inverse_root_newton
        order = 1 + max(int(key.rpartition(".")[2]) for key in known)
        return {key: find(L_DD, 2 * order, self.option(name, "damping")) for key, L_DD in known.items()}

    def direction(self, name: str, inverse: State, g: Tensor) -> Tensor:
        found = torch.empty_like(_merged(g, self.options.block_size))
        for index, (block, out) in enumerate(zip(self._blocks(g), self._views(found), strict=True)):
            out.copy_(self._rotated(block, index, inverse, transpose=False))
        return found.view_as(g)

    def can_hold(self, name: str, inverse: State) -> bool:
        # a matrix, not merged into a vector
        return "0.1" in inverse

    def direction_of_rows(self, name: str, inverse: State, rows: FactoredGrad) -> tuple[Tensor, Tensor | None]:
        shape = rows.e_XO.shape[1], rows.a_XI.shape[1]
        found = rows.e_XO.new_empty(shape)
        corners = list(_corners(shape, self.options.block_size))
        for index, ((outputs, inputs), out) in enumerate(zip(corners, self._views(found), strict=True)):
            part = FactoredGrad(rows.a_XI[:, inputs], rows.e_XO[:, outputs], has_bias=False)
            out.copy_(part.preconditioned(inverse[f"{index}.0"], inverse[f"{index}.1"])[0])
        return found, None

    @staticmethod
    def _rotated(block: Tensor, index: int, inverse: State, *, transpose: bool) -> Tensor:
        """The block's matrix, or its transpose, on every dimension."""
        if block.ndim == 2:
            left_OO, right_II = (inverse[f"{index}.{k}"].T if transpose else inverse[f"{index}.{k}"] for k in range(2))
            return gemm.mm(gemm.mm(left_OO, block), right_II.T)
        for k in range(block.ndim):
            block = torch.tensordot(inverse[f"{index}.{k}"], block, dims=([0 if transpose else 1], [k])).movedim(0, k)
        return block

    def _blocks(self, g: Tensor) -> Iterator[Tensor]:
        return self._views(_merged(g, self.options.block_size))

    def _views(self, merged: Tensor) -> Iterator[Tensor]:
        for corner in _corners(merged.shape, self.options.block_size):
            yield merged[corner]


# units of the last place of a norm: what is below is noise
_ROUNDING = 8.0


@dataclass(frozen=True)
class SOAPOptions(BlockOptions):
    """Of SOAP."""

    # eps: added to sqrt(v), as in Adam
    damping: float = 1e-8
    # beta 2: of v and of the L_i
    ema_decay: float = 0.95
    # beta 1: of the gradient; 0 to below 1
    momentum: float = 0.95

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0.0 <= self.momentum < 1.0:
            found.append(f"momentum is {self.momentum}; it must be at least 0 and below 1.")
        return found


class SOAP(Shampoo):
    """Adam in the eigenvectors of Shampoo's L_i; a vector keeps its own coordinates (Adam).

    The first gradient of a tensor only begins the L_i, and its direction is 0.  m and v are updated at every step, in the basis
    of the steps before; only the L_i wait for curvature_interval and the basis for inverse_interval.  A new basis is one round of
    power iteration from the last and a QR decomposition: m is rotated into it, v keeps to its columns.  Momentum is SOAP's own, so
    that of the optimizer stays 0.
    """

    Options = SOAPOptions
    applies_first = True

    def can_hold(self, name: str, inverse: State) -> bool:
        # the moments lie between the bases
        return False

    def measure_gradient(self, name: str, g: Tensor) -> State:
        # the square of the first gradient in float64, which keeps the digits that decide the first
        # basis
        return super().measure_gradient(name, g if name in self.inverses else g.double()) if g.ndim > 1 else {}

    def _average(self, name: str, new: State) -> None:
        if new:
            Preconditioner._average(self, name, new)
        else:
            # a vector has no factors
            self.statistics[name], self.weights[name] = {}, 1.0

    def refresh(self) -> None:
        begun = [name for name in self.statistics if name not in self.inverses]
        super().refresh()
        for name in begun:
            own = self.inverses[name]["weight_m"].dtype
            self.statistics[name] = {key: L_DD.to(own) for key, L_DD in self.statistics[name].items()}

    def invert(self, name: str, known: State) -> State:
        old = self.inverses.get(name)
        return self._begun(name, known) if old is None else self._tracked(known, old)

    def _begun(self, name: str, known: State) -> State:
        """The first basis, and moments of nothing."""
        p = self.oriented(name, upcast(dict(self.model.named_parameters())[name].detach()))
        moments = {f"{index}.{key}": torch.zeros_like(block) for index, block in enumerate(self._blocks(p)) for key in ("m", "v")}
        return {**{key: _eigenvectors(L_DD, p.dtype) for key, L_DD in known.items()}, **moments,
                "weight_m": p.new_zeros(()), "weight_v": p.new_zeros(())}

    @staticmethod
    def _tracked(known: State, old: State) -> State:
        """The basis and the moments after one round of power iteration."""
        found = dict(old)
        for key, L_DD in known.items():
            index, _, k = key.partition(".")
            Q_DD = old[key]
            LQ_DD = gemm.mm(L_DD, Q_DD)
            # the shift keeps columns that L sends to 0, whose image is rounding noise, where they
            # were
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
            # averaged over workers, whose bases have no mean
            if name not in self.inverses and self.statistics.get(name):
                self.inverses[name] = self._inverted(name, self.curvature(name))
            if name in self.inverses:
                found[name] = self._adam(self.inverses[name], g, self.option(name, "ema_decay"), self.option(name, "damping"))
            else:
                # and not zeros: a gradient that is not finite stays so
                found[name] = g * 0.0
                # this step looks at the curvature, whatever the interval
                self._last = dict.fromkeys(self._last)
        return found

    def _adam(self, inverse: State, g: Tensor, beta_2: float, damping: float) -> Tensor:
        """The direction; moments stay as they are where the gradient is not finite, which the host is not asked for."""
        # and so the squares of all coordinates
        is_finite = torch.linalg.vector_norm(g).isfinite()
        share_m, share_v = is_finite * g.new_full((), 1.0 - self.options.momentum), is_finite * g.new_full((), 1.0 - beta_2)
        for key, share in (("weight_m", share_m), ("weight_v", share_v)):
            inverse[key].lerp_(torch.ones_like(share), share)
        found = torch.empty_like(_merged(g, self.options.block_size))
        for index, (block, out) in enumerate(zip(self._blocks(torch.where(is_finite, g, 0.0)), self._views(found), strict=True)):
            own, m, v = self._rotated(block, index, inverse, transpose=True), inverse[f"{index}.m"], inverse[f"{index}.v"]
            m.lerp_(own, share_m)
            v.lerp_(own.square(), share_v)
            root = (v / inverse["weight_v"]).sqrt_()
            # a rotation's rounding is no gradient
            root.add_(damping + _noise(root.norm()))
            out.copy_(self._rotated(m / inverse["weight_m"] / root, index, inverse, transpose=False))
        return torch.where(is_finite, found.view_as(g), g)

    @staticmethod
    def _rotated(block: Tensor, index: int, inverse: State, *, transpose: bool) -> Tensor:
        return Shampoo._rotated(block, index, inverse, transpose=transpose) if f"{index}.0" in inverse else block


def _noise(norm: Tensor) -> Tensor:
    return norm * (_ROUNDING * torch.finfo(norm.dtype).eps)


def _eigenvectors(L_DD: Tensor, dtype: torch.dtype) -> Tensor:
    """Of products of gradients of that type: as columns, in falling order.

    For eigenvalues that are 0 but for rounding any basis would do; it is the same always.
    """
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
    """Adjacent dimensions become one while the product is at most the block size; ones are dropped."""
    shape: list[int] = []
    for length in g.shape:
        if shape and shape[-1] * length <= size and (len(shape) > 1 or length == 1 or shape[-1] == 1):
            shape[-1] *= length
        else:
            shape.append(length)
    return g.reshape(shape or [1])
