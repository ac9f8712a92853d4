"""Momentum in whole numbers, so that every step can be undone bit for bit in memory that does not
grow with the parameters.

Maclaurin, Duvenaud and Adams (arXiv 1502.03492) undo v = gamma v by keeping the digits that the
product drops.  Here the velocity of a layer is v = u c, u whole numbers and c one float64 for all
of them: to multiply by gamma is to multiply c, and no digit is touched.  u then grows by 1/gamma a
step, and whenever c has fallen by 256 the lowest 8 bits of u are put aside, which is log2(1/gamma)
bits per parameter and step, the least that can be.  Neither gamma nor a learning rate is rounded.

Letters: P parameters, G layers (groups), t step; x position and u velocity as int64, w = x 2^-48, v
    = u c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.errors import DivergenceError, ReversalError
from ngsgd.hypergrad import fused

# of the fraction: resolution 4e-15
POSITION_BITS = 48
# c stays in (2^-52, 2^-44], so the velocity's resolution is 6e-14 or finer
VELOCITY_BITS = 44
SPILL_BITS = 8
# of x and u: |w| below 2^14, |v| below 2^10 at the least; wrapped numbers would be undone exactly
# too
_LIMIT = 1 << 62
_START = 2.0 ** -VELOCITY_BITS
_FLOOR = 2.0 ** -(VELOCITY_BITS + SPILL_BITS)
_WORD = 1 << 64


@dataclass(frozen=True)
class Digest:
    """Sums of x and of u, modulo 2^64: one wrong bit in either shows."""

    position: int
    velocity: int


@dataclass(frozen=True)
class _Step:
    """What undoing a step needs beside x, u and what was put aside."""

    before: Digest
    scale_G: tuple[float, ...]    # c before the step
    gamma_G: tuple[float, ...]
    # bytes that u lost (above 0) or gained (below)
    shift_G: tuple[int, ...]


class ExactMomentum:
    """Position and velocity of a flat parameter vector; `step` and, in reverse order, `undo_x` and
    `undo_v`.

    A step is v = gamma v - (1 - gamma) g, then w += rate v, per layer; `undo_v` must be given the
    very bits of g.

    Args:
        weights: P numbers, float32 or float64.
        dtype: of what `weights()` returns and of gradients; that of `weights` if not given.
        groups: one slice per layer, which together cover the vector in order.
        keeps: whether steps are to be undone; without, nothing is put aside, and a momentum of 0
            costs nothing.
        engine: "auto" takes the compiled kernels where they can be built, "eager" never; equal
            bits.

    Raises DivergenceError when a gradient is not finite or a number leaves its range, naming step
    and layer, and ReversalError when an undone step does not lead back to the digest that the
    forward pass had there.
    """

    def __init__(self, weights: Tensor, groups: Sequence[slice], *,
                 dtype: torch.dtype | None = None, keeps: bool = True,
                 engine: str = "auto", names: Sequence[str] | None = None) -> None:
        covered = [group.stop for group in groups[:-1]] == [group.start for group in groups[1:]]
        if not groups or groups[0].start != 0 or groups[-1].stop != weights.numel() or not covered:
            raise ValueError(f"Invalid groups: they must cover the {weights.numel()} parameters in "
                             "order, without gaps")
        self.groups = tuple(groups)
        self.names = tuple(names) if names is not None else tuple(f"layer {index}"
                                                                  for index in range(len(groups)))
        self.dtype = dtype or weights.dtype
        self.keeps = keeps
        self._kernels = fused.kernels_for(weights.device, self.dtype, engine)
        self.x_P = _rounded(weights.detach().reshape(-1).double() * 2.0 ** POSITION_BITS,
                            "a starting weight")
        self.u_P = torch.zeros_like(self.x_P)
        self._w_P = torch.empty_like(self.x_P, dtype=self.dtype)
        self._read_weights()
        self.scale_G = (_START,) * len(groups)   # c
        self._steps: list[_Step] = []
        self._spills: list[list[Tensor]] = [[] for _ in groups]
        self._digest = Digest(_sum(self.x_P), 0)
        self.num_steps = 0

    def step(self, grad_P: Tensor, rate_G: Sequence[float], gamma_G: Sequence[float]) -> None:
        """One step forward: velocity, then position."""
        self.step_v(grad_P, gamma_G)
        self.step_x(rate_G)

    def step_v(self, grad_P: Tensor, gamma_G: Sequence[float]) -> None:
        """v = gamma v - (1 - gamma) g."""
        for gamma in gamma_G:
            if not 0.0 <= gamma < math.inf:
                raise ValueError(f"Invalid momentum: {gamma}; it must be at least 0")
        before, scale_G, shift_G = self._digest, [], []
        for index, gamma in enumerate(gamma_G):
            scale, shift = self._decay(index, gamma)
            scale_G.append(scale)
            shift_G.append(shift)
        self._steps += [_Step(before, self.scale_G, tuple(gamma_G), tuple(shift_G))] if self.keeps else []
        self.scale_G = tuple(scale_G)
        self.num_steps += 1
        self._digest = Digest(self._digest.position, self._add_gradient(grad_P, gamma_G, -1))

    def step_x(self, rate_G: Sequence[float]) -> None:
        """w += rate v."""
        self._digest = Digest(self._add_velocity(rate_G, 1), self._digest.velocity)

    def shift_x(self, grad_P: Tensor, factor_G: Sequence[float], sign: int) -> None:
        """w += sign factor g: for steps that also move along the gradient itself."""
        for index, (group, factor) in enumerate(zip(self.groups, factor_G, strict=True)):
            if self._kernels.add_scaled(self.x_P[group], grad_P[group],
                                        factor * 2.0 ** POSITION_BITS, sign) is None:
                raise self._diverged(index, "a weight leaves its range")
        self._read_weights()
        self._digest = Digest(_sum(self.x_P), self._digest.velocity)

    def undo_x(self, rate_G: Sequence[float]) -> None:
        """Takes the last step's move back; then `weights()` are those that its gradient belongs to."""
        self._digest = Digest(self._add_velocity(rate_G, -1), self._digest.velocity)
        if self._digest.position != self._steps[-1].before.position:
            raise ReversalError(self.num_steps, "its weights are not those of the forward pass")

    def undo_v(self, grad_P: Tensor) -> None:
        """Takes the last step's change of the velocity back, given the gradient at `weights()`."""
        last = self._steps[-1]
        velocity = self._add_gradient(grad_P, last.gamma_G, 1)
        for index, shift in enumerate(last.shift_G):
            if shift:
                self._unshift(index, shift, last.gamma_G[index])
        self._digest = Digest(self._digest.position,
                              _sum(self.u_P) if any(last.shift_G) else velocity)
        if self._digest != last.before:
            raise ReversalError(self.num_steps, "its gradient, or what was put aside, is not that "
                                                "of the forward pass")
        self.scale_G = last.scale_G
        self._steps.pop()
        self.num_steps -= 1

    def weights(self) -> Tensor:
        """w, P numbers of the type given at the start; a view that the next step changes."""
        return self._w_P

    def position(self) -> Tensor:
        """w in float64, P."""
        return self.x_P.double() * 2.0 ** -POSITION_BITS

    def velocity(self) -> Tensor:
        """v in float64, P."""
        v_P = self.u_P.double()
        for group, scale in zip(self.groups, self.scale_G, strict=True):
            v_P[group] *= scale
        return v_P

    def velocity_norms(self) -> list[float]:
        """L2 norm of each layer's velocity, G; the same bits in both engines."""
        return [scale * math.sqrt(sum(
            float(torch.dot(part, part))
            for part in map(Tensor.double, self.u_P[group].split(fused.CHUNK))))
            for group, scale in zip(self.groups, self.scale_G, strict=True)]

    def digest(self) -> Digest:
        """Of the state as it lies in memory now."""
        return Digest(_sum(self.x_P), _sum(self.u_P))

    def verify(self) -> None:
        """Raises ReversalError if the state in memory is not the one that the last step left."""
        if self.digest() != self._digest:
            raise ReversalError(self.num_steps, "its state in memory has changed since")

    def copy(self) -> ExactMomentum:
        """One of its own, from here on; it cannot undo the steps before."""
        other = copy(self)
        other.x_P, other.u_P, other._w_P = self.x_P.clone(), self.u_P.clone(), self._w_P.clone()
        other._steps, other._spills = [], [[] for _ in self.groups]
        return other

    def state_dict(self) -> dict[str, Any]:
        """All that going on and going back need, as tensors and numbers."""
        steps = [(astuple(step.before), step.scale_G, step.gamma_G, step.shift_G)
                 for step in self._steps]
        return {"x": self.x_P.clone(), "u": self.u_P.clone(), "scale": self.scale_G,
                "digest": astuple(self._digest),
                "steps": steps, "spills": [list(parts) for parts in self._spills],
                "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a state of the same groups; raises ReversalError if its digest is not its own."""
        self.x_P.copy_(state["x"])
        self.u_P.copy_(state["u"])
        self.scale_G, self._digest, self.num_steps = tuple(state["scale"]), Digest(*state["digest"]), state["num_steps"]
        self._steps = [_Step(Digest(*before), tuple(scale), tuple(gamma), tuple(shift))
                       for before, scale, gamma, shift in state["steps"]]
        self._spills = [list(parts) for parts in state["spills"]]
        self.verify()
        self._read_weights()

    @property
    def spill_bytes(self) -> int:
        """What was put aside, in bytes."""
        return sum(part.numel() * part.element_size() for parts in self._spills for part in parts)

    # Layers of the velocity -----------------------------------------------------------------------

    def _decay(self, index: int, gamma: float) -> tuple[float, int]:
        """(the new c, bytes that u lost): the multiplication by gamma."""
        u_P = self.u_P[self.groups[index]]
        if gamma == 0.0:
            self._put_aside(index, u_P.clone())
            u_P.zero_()
            return _START, SPILL_BITS  # all eight bytes
        scale, shift = self.scale_G[index] * gamma, 0
        while scale <= _FLOOR:
            self._put_aside(index, (u_P & 255).to(torch.uint8))
            u_P >>= SPILL_BITS
            scale, shift = scale * 256.0, shift + 1
        # gamma above 1: the digits that come in are zeros, and nothing need be kept
        while scale > _START:
            if int(u_P.abs().max()) >= _LIMIT >> SPILL_BITS:
                raise self._diverged(index, "the velocity leaves its range")
            u_P <<= SPILL_BITS
            scale, shift = scale / 256.0, shift - 1
        return scale, shift

    def _put_aside(self, index: int, part: Tensor) -> None:
        if self.keeps:
            self._spills[index].append(part)

    def _unshift(self, index: int, shift: int, gamma: float) -> None:
        u_P = self.u_P[self.groups[index]]
        try:
            if gamma == 0.0:
                u_P.copy_(self._spills[index].pop())
                return
            for _ in range(shift):
                u_P <<= SPILL_BITS
                u_P |= self._spills[index].pop()
            for _ in range(-shift):
                u_P >>= SPILL_BITS
        except IndexError:
            raise ReversalError(self.num_steps, "what was put aside there is missing") from None

    # Arithmetic over the vector -------------------------------------------------------------------

    def _add_gradient(self, grad_P: Tensor, gamma_G: Sequence[float], sign: int) -> int:
        """u += sign rint(g (1 - gamma) / c); returns the sum of u."""
        total = 0
        for index, (group, gamma, scale) in enumerate(zip(self.groups, gamma_G, self.scale_G,
                                                          strict=True)):
            factor = (1.0 - gamma) / scale
            found = self._kernels.add_scaled(self.u_P[group], grad_P[group], factor, sign)
            if found is None:
                raise self._diverged(index, "a gradient is not finite or the velocity leaves its "
                                            "range")
            total += found
        return total % _WORD

    def _add_velocity(self, rate_G: Sequence[float], sign: int) -> int:
        """x += sign rint(u rate c 2^48), then the weights; returns the sum of x."""
        total = 0
        for index, (group, rate, scale) in enumerate(zip(self.groups, rate_G, self.scale_G,
                                                         strict=True)):
            factor = rate * scale * 2.0 ** POSITION_BITS
            found = self._kernels.apply_velocity(self.x_P[group], self.u_P[group],
                                                 self._w_P[group], factor, sign)
            if found is None:
                raise self._diverged(index, "a weight leaves its range")
            total += found
        return total % _WORD

    def _read_weights(self) -> None:
        for group in self.groups:
            self._kernels.apply_velocity(self.x_P[group], self.u_P[group], self._w_P[group], 0.0, 1)

    def _diverged(self, index: int, what: str) -> DivergenceError:
        return DivergenceError(f"{self.names[index]}: {what} in step {self.num_steps}; lower the "
                               "learning rate, or limit the change with max_change.")


def _rounded(values_P: Tensor, what: str) -> Tensor:
    """float64 to int64, to the nearest even; raises for what does not fit, which a cast would wrap."""
    if not bool((values_P.abs() < _LIMIT).all()):
        raise DivergenceError(f"{what} is not finite or at least 2^{62 - POSITION_BITS} in size; "
                              "scale the model down.")
    return values_P.round().to(torch.int64)


def _sum(whole_P: Tensor) -> int:
    return int(whole_P.sum()) % _WORD
