"""Preconditioners of each tensor's dimensions, from gradients alone.

    Shampoo   G x_1 L_1^(-1/(2 k)) .. x_k L_k^(-1/(2 k)),  L_i = mean of G_(i) G_(i)^T over steps    Gupta et al. 2018, algorithm 2
    SOAP      Q^T g / (sqrt(v) + d) in the eigenvectors Q of the L_i, v = mean of (Q^T g)^2            Vyas et al. 2024

Large tensors are cut into blocks, small adjacent dimensions are merged (a convolution's channels and taps).  The damping of Shampoo
is relative to the largest eigenvalue of each L_i.

Letters: k dimensions of a block, D size of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import products
from ngsgd.ops.linalg import eigh, inverse_root, inverse_root_newton
from ngsgd.preconditioners.held import HeldRows
from ngsgd.preconditioners.options import Options
from ngsgd.preconditioners.protocol import Preconditioner
from ngsgd.preconditioners.states import State


@dataclass(frozen=True)
class ShampooOptions(Options):
    """Of Shampoo."""

    damping: float = 1e-6            # times the largest eigenvalue of a factor
    block_size: int = 1024           # largest dimension of a factor
    history: str = "average"         # of G G^T: "average" with ema_decay, or "sum" of all steps, as in the paper
    root_method: str = "eigen"       # "eigen", or "newton": products only, quicker on GPUs

    def problems(self) -> list[str]:
        found = super().problems()
        if self.block_size < 1:
            found.append(f"block_size is {self.block_size}; it must be at least 1.")
        found += [f"{name} is {value!r}; choose {', '.join(known)}." for name, value, known
                  in (("history", self.history, ("average", "sum")), ("root_method", self.root_method, ("eigen", "newton")))
                  if value not in known]
        return found


class Shampoo(Preconditioner):
    """Shampoo; a bias is a tensor of one dimension, and with it full-matrix AdaGrad."""

    Options = ShampooOptions
    joins_bias = False   # tensors stay apart
    splits_work = True

    def measure_gradient(self, name: str, g: Tensor) -> State:
        factors = {}
        for index, block in enumerate(self._blocks(g)):
            for k in range(block.ndim):
                G_DX = block.movedim(k, 0).reshape(block.shape[k], -1)
                factors[f"{index}.{k}"] = products.mm(G_DX, G_DX.T)
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
        return "0.1" in inverse   # a matrix, not merged into a vector

    def direction_of_rows(self, name: str, inverse: State, rows: HeldRows) -> tuple[Tensor, Tensor | None]:
        shape = rows.e_XO.shape[1], rows.a_XI.shape[1]
        found = rows.e_XO.new_empty(shape)
        corners = list(_corners(shape, self.options.block_size))
        for index, ((outputs, inputs), out) in enumerate(zip(corners, self._views(found), strict=True)):
            part = HeldRows(rows.a_XI[:, inputs], rows.e_XO[:, outputs], has_bias=False)
            out.copy_(part.preconditioned(inverse[f"{index}.0"], inverse[f"{index}.1"])[0])
        return found, None

    @staticmethod
    def _rotated(block: Tensor, index: int, inverse: State, *, transpose: bool) -> Tensor:
        """The block's matrix, or its transpose, on every dimension."""
        if block.ndim == 2:
            left_OO, right_II = (inverse[f"{index}.{k}"].T if transpose else inverse[f"{index}.{k}"] for k in range(2))
            return products.mm(products.mm(left_OO, block), right_II.T)
        for k in range(block.ndim):
            block = torch.tensordot(inverse[f"{index}.{k}"], block, dims=([0 if transpose else 1], [k])).movedim(0, k)
        return block

    def _blocks(self, g: Tensor) -> Iterator[Tensor]:
        return self._views(_merged(g, self.options.block_size))

    def _views(self, merged: Tensor) -> Iterator[Tensor]:
        for corner in _corners(merged.shape, self.options.block_size):
            yield merged[corner]


@dataclass(frozen=True)
class SOAPOptions(ShampooOptions):
    """Of SOAP."""

    damping: float = 1e-8    # added to sqrt(v), as in Adam

    def problems(self) -> list[str]:
        found = super().problems()
        if self.history == "sum":
            found.append("history is \"sum\"; SOAP's second moments are averages, so leave it \"average\".")
        return found


class SOAP(Shampoo):
    """Adam's second moments in Shampoo's eigenvectors; momentum is the optimiser's business."""

    Options = SOAPOptions

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._seen: dict[str, Tensor] = {}   # this step's gradients, for the first moments of all

    def can_hold(self, name: str, inverse: State) -> bool:
        return False   # the moments lie between the bases

    def update_curvature(self, seen: Any) -> None:
        super().update_curvature(seen)
        for name, g in seen.items():
            inverse = self.inverses.get(name)
            if inverse is not None and bool(g.isfinite().all()):
                self._take_moments(name, inverse, g, self.option(name, "ema_decay"))
            self._seen[name] = g

    def step(self, lr: float | None = None) -> None:
        super().step(lr)
        self._seen.clear()

    def _take_moments(self, name: str, inverse: State, g: Tensor, decay: float) -> None:
        for index, block in enumerate(self._blocks(g)):
            v = self._rotated(block, index, inverse, transpose=True).square()
            inverse[f"{index}.v"].mul_(decay).add_(v, alpha=1.0 - decay)
        inverse["weight"].mul_(decay).add_(1.0 - decay)

    def invert(self, name: str, known: State) -> State:
        found = {key: eigh(L_DD)[1] for key, L_DD in known.items()}
        old = self.inverses.get(name)
        if old is not None:   # moments go on in the new basis, which has turned little
            return {**found, **{key: value for key, value in old.items() if key not in found}}
        found["weight"] = torch.zeros((), dtype=torch.float64)
        like = dict(self.model.named_parameters())[name]
        for index, block in enumerate(self._blocks(like)):
            found[f"{index}.v"] = torch.zeros_like(block)
        if name in self._seen:
            self._take_moments(name, found, self._seen[name], self.option(name, "ema_decay"))
        return found

    def direction(self, name: str, inverse: State, g: Tensor) -> Tensor:
        found = torch.empty_like(_merged(g, self.options.block_size))
        weight = inverse["weight"].to(g)
        for index, (block, out) in enumerate(zip(self._blocks(g), self._views(found), strict=True)):
            root = (inverse[f"{index}.v"] / weight).sqrt() + self.option(name, "damping")
            out.copy_(self._rotated(self._rotated(block, index, inverse, transpose=True) / root, index, inverse, transpose=False))
        return found.view_as(g)


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
