"""Fisher estimates on a device: one memory, and one update for all of them.

On a GPU the launch of an operation costs more than the algebra of an estimate. All estimates are
therefore one stack, padded with zeros to the largest rank and dimension. Nothing waits for the
host. The memory does not move, so that CUDA graphs may contain all of it.

Letters: L estimates, R rank, D dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ngsgd.ops import polar_update as ops
from ngsgd.ops.natural_gradient import FisherState, Moments, Smoothing, UpdateProblem
from ngsgd.ops.polar_update import PolarState
from ngsgd.ops.tensors import DeviceNumbers

Number = Tensor | float
# Rows begin at multiples of so many numbers, which is faster on a GPU.
_ALIGNED = 4


class Estimate(Protocol):
    """What memory and queue use of `OnlineNaturalGradient`."""

    smoothing: Smoothing

    @property
    def polar_state(self) -> PolarState:
        """The estimate, without the updates that wait."""

    def hold(self, state: PolarState) -> None:
        """Store the same estimate in other memory."""

    def has_state(self, state: PolarState) -> bool:
        """Return whether the estimate is this object."""

    def problem(self, J_RD: Tensor, moments: Moments) -> UpdateProblem:
        """Return the update of the current estimate in Kaldi's form by a minibatch."""

    def updated(self, problem: UpdateProblem, state: FisherState) -> None:
        """Replace the estimate in Kaldi's form by the result of an update."""


class Shares(NamedTuple):
    """Weights of a minibatch in an update, both numbers of the host or both of the device."""

    # eta / N
    of_rows: Number
    # 1 - eta
    of_past: Number


class Stacked(NamedTuple):
    """Estimates of rows of one dtype: the members from `first` on."""

    first: int
    R_LRD: Tensor
    V_LRD: Tensor
    # R X^T X of the minibatch of the next update
    J_LRD: Tensor

    @property
    def rank(self) -> int:
        return self.R_LRD.shape[1]

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.R_LRD))


class FisherStack:
    """The memory of some estimates, which become views of it.

    Args:
        estimates: in polar form, on one device.
    """

    def __init__(self, estimates: Sequence[Estimate]) -> None:
        by_dtype: dict[torch.dtype, dict[torch.Size, list[Estimate]]] = {}
        for estimate in estimates:
            R_RD = estimate.polar_state.R_RD
            by_dtype.setdefault(R_RD.dtype, {}).setdefault(R_RD.shape, []).append(estimate)
        # Those of one shape follow each other, so that batched products read and write them.
        parts = [[estimate for own in shapes.values() for estimate in own] for shapes in by_dtype.values()]
        self.members = tuple(estimate for own in parts for estimate in own)
        states = [estimate.polar_state for estimate in self.members]
        size = max(len(state.R_RD) for state in states)
        self.M_LRR = torch.stack([_padded(state.M_RR, size, size) for state in states])
        self.rho_L = torch.stack([state.rho for state in states])
        # tr X X^T of the next update
        self.sum_sq_L = torch.zeros_like(self.rho_L)
        self._shares_2L = torch.zeros(2, len(states), dtype=torch.float64, device=self.rho_L.device)
        self._constants: dict[tuple[int, ...], ops.Constants] = {}
        self._numbers = DeviceNumbers()
        self.parts: list[Stacked] = []
        self._views: list[PolarState] = []
        for own in parts:
            first, shapes = len(self._views), [estimate.polar_state.R_RD.shape for estimate in own]
            rank, dim = max(shape[0] for shape in shapes), -max(shape[1] for shape in shapes) // _ALIGNED * -_ALIGNED
            R_LRD, V_LRD = (torch.stack([_padded(getattr(estimate.polar_state, name), rank, dim) for estimate in own])
                            for name in ("R_RD", "V_RD"))
            self.parts.append(Stacked(first, R_LRD, V_LRD, torch.zeros_like(R_LRD)))
            for number, (R, D) in enumerate(shapes):
                self._views.append(PolarState(R_LRD[number, :R, :D], V_LRD[number, :R, :D],
                                              self.M_LRR[first + number, :R, :R], self.rho_L[first + number]))
        for estimate, view in zip(self.members, self._views, strict=True):
            estimate.hold(view)
        self._places = {id(estimate): number for number, estimate in enumerate(self.members)}

    def holds(self, estimates: Sequence[Estimate]) -> bool:
        """Return whether these estimates are views of this memory."""
        places = [self._places.get(id(estimate)) for estimate in estimates]
        return all(place is not None and estimate.has_state(self._views[place])
                   for place, estimate in zip(places, estimates, strict=True))

    def places_of(self, estimates: Sequence[Estimate], dtype: torch.dtype) -> tuple[tuple[int, ...], Stacked]:
        """Return the places of members of one dtype in their part of the stack, and the part."""
        part = next(part for part in self.parts if part.R_LRD.dtype == dtype)
        return tuple(self._places[id(estimate)] - part.first for estimate in estimates), part

    def record(self, estimate: Estimate, J_RD: Tensor, sum_sq: Number, shares: Shares) -> None:
        """Keep the products of a minibatch until `update`."""
        place = self._places[id(estimate)]
        self._J_of(place).copy_(J_RD)
        self.sum_sq_L[place].copy_(torch.as_tensor(sum_sq, dtype=torch.float64))
        self.record_shares({estimate: shares})

    def recorded(self, estimate: Estimate) -> tuple[Tensor, Tensor]:
        """Return copies of the products of a minibatch: J and tr X X^T."""
        place = self._places[id(estimate)]
        return self._J_of(place).clone(), self.sum_sq_L[place].clone()

    def _J_of(self, place: int) -> Tensor:  # noqa: N802
        part = next(part for part in reversed(self.parts) if part.first <= place)
        R, D = self._views[place].R_RD.shape
        return part.J_LRD[place - part.first, :R, :D]

    def record_shares(self, shares: Mapping[Any, Shares]) -> None:
        """Keep the shares of members that are numbers of the device."""
        for estimate, own in shares.items():
            if isinstance(own.of_rows, Tensor) or isinstance(own.of_past, Tensor):
                for shares_L, share in zip(self._shares_2L, own, strict=True):
                    shares_L[self._places[id(estimate)]].copy_(torch.as_tensor(share, dtype=torch.float64))

    @torch.no_grad()
    def update(self, shares: Mapping[int, Shares]) -> None:
        """Update the estimates with these ids, except by products without rows or not finite."""
        rows = tuple(place for place, estimate in enumerate(self.members) if id(estimate) in shares)
        constants, chosen = self._constants_of(rows), _Rows(rows, len(self.members))
        shares_4L = self._shares(shares, chosen)
        now = ops.Spectrum(chosen.of(self.M_LRR), chosen.of(self.rho_L))
        size, all_Y_LRD, all_Z_LRR = len(self.M_LRR[0]), [], []
        for part in self.parts:
            own, place = chosen.within(part.rows)
            if own.rows:
                # Y N / eta, in the dtype of the rows; float64 for the R x R matrices
                past_LRR = ops.kept(ops.Spectrum(now.M_LRR[place], now.rho_L[place]), shares_4L[2, place], part.R_LRD.dtype)
                Y_LRD = torch.baddbmm(own.of(part.J_LRD), past_LRR[:, :part.rank, :part.rank], own.of(part.R_LRD))
                Y64_LRD = Y_LRD.double()
                all_Z_LRR.append(_padded(torch.bmm(Y64_LRD, Y64_LRD.mT), size, size))
                all_Y_LRD.append((part, own, place, Y_LRD))
        Z_LRR = torch.cat(all_Z_LRR) if len(all_Z_LRR) > 1 else all_Z_LRR[0]
        P_LRR, is_finite_L = ops.next_spectrum(Z_LRR, now, chosen.of(self.sum_sq_L), shares_4L, constants)
        is_finite_L11 = is_finite_L[:, None, None]
        if not chosen.is_all:
            chosen.put(self.M_LRR, now.M_LRR)
            chosen.put(self.rho_L, now.rho_L)
        E_LRR = ops.removed(now, constants)
        for part, own, place, Y_LRD in all_Y_LRD:
            square = slice(part.rank), slice(part.rank)
            own_P_LRR = torch.mul(P_LRR[place, *square], shares_4L[0, place, None, None],
                                  out=Y_LRD.new_empty(len(Y_LRD), part.rank, part.rank))
            own_E_LRR, R_LRD = E_LRR[place, *square].to(Y_LRD.dtype), torch.bmm(own_P_LRR, Y_LRD)
            if own.is_all:
                torch.where(is_finite_L11[place], R_LRD, part.R_LRD, out=part.R_LRD)
                torch.bmm(own_E_LRR, part.R_LRD, out=part.V_LRD)
            else:
                R_LRD = torch.where(is_finite_L11[place], R_LRD, own.of(part.R_LRD))
                own.put(part.R_LRD, R_LRD)
                own.put(part.V_LRD, torch.bmm(own_E_LRR, R_LRD))

    def _shares(self, shares: Mapping[int, Shares], rows: _Rows) -> Tensor:
        """Return eta / N, 1 - eta, (1 - eta) N / eta and (eta / N)^2 of each, 4 x L."""
        own = [shares[id(self.members[row])] for row in rows.rows]
        if not any(isinstance(number, Tensor) for numbers in own for number in numbers):
            pairs = [(float(of_rows), float(of_past)) for of_rows, of_past in own]
            flat = (*zip(*pairs, strict=True), [past / rows for rows, past in pairs], [rows**2 for rows, _ in pairs])
            return self._numbers(self.rho_L, *(number for numbers in flat for number in numbers)).view(4, -1)
        for row, of_member in zip(rows.rows, own, strict=True):
            if not isinstance(of_member.of_rows, Tensor):
                self._shares_2L[0, row].fill_(of_member.of_rows)
                self._shares_2L[1, row].fill_(of_member.of_past)
        share_L, keep_L = rows.of(self._shares_2L[0]), rows.of(self._shares_2L[1])
        return torch.stack([share_L, keep_L, keep_L / share_L, share_L.square()])

    def _constants_of(self, rows: tuple[int, ...]) -> ops.Constants:
        if rows not in self._constants:
            own = [self.members[place] for place in rows]
            self._constants[rows] = ops.Constants.of([estimate.polar_state.R_RD.shape[1] for estimate in own],
                [len(estimate.polar_state.R_RD) for estimate in own], [estimate.smoothing for estimate in own], self.rho_L.device)
        return self._constants[rows]


class _Rows(NamedTuple):
    """Some rows of a stack of `size`; without a copy if these are all."""

    rows: tuple[int, ...]
    size: int

    @property
    def is_all(self) -> bool:
        return len(self.rows) == self.size

    def of(self, stacked: Tensor) -> Tensor:
        return stacked if self.is_all else torch.stack([stacked[row] for row in self.rows])

    def put(self, stacked: Tensor, values: Tensor) -> None:
        if self.is_all:
            stacked.copy_(values)
        else:
            torch._foreach_copy_([stacked[row] for row in self.rows], list(values.unbind()))

    def within(self, part: slice) -> tuple[_Rows, slice]:
        """Return the rows of a part of the stack, and their places among these rows."""
        own = [place for place, row in enumerate(self.rows) if part.start <= row < part.stop]
        first = own[0] if own else 0
        return (_Rows(tuple(self.rows[place] - part.start for place in own), part.stop - part.start),
                slice(first, first + len(own)))


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    missing = rows - matrix.shape[-2], columns - matrix.shape[-1]
    return torch.nn.functional.pad(matrix, (0, missing[1], 0, missing[0])) if any(missing) else matrix
