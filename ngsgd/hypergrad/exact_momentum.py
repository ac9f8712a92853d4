"""Momentum in integer arithmetic, so that every step can be reversed exactly with little memory.

The velocity of a layer is v = u c, with integers u and one float64 c, which alone is multiplied by
gamma. Whenever c has fallen by 256, the lowest 8 bits of u are stored: log2(1/gamma) bits per
parameter and step, the theoretical minimum. Source: arXiv 1502.03492.

Letters: P parameters, G layers (groups), t step; x position and u velocity as int64, w = x 2^-48, v
= u c.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngsgd.arguments import require_state
from ngsgd.errors import ArgumentError, DivergenceError, OptimizerStateError, ReversalError
from ngsgd.ops.kernels import native

# Fraction bits of the position: resolution 4e-15.
POSITION_BITS = 48
# c stays in (2^-52, 2^-44], so the velocity has a resolution of 6e-14 or finer.
VELOCITY_BITS = 44
SPILL_BITS = 8
# Limit of x and u: |w| below 2^14, |v| at least up to 2^10. Wrapped numbers would also reverse
# exactly.
_LIMIT = 1 << 62
_START = 2.0 ** -VELOCITY_BITS
_FLOOR = 2.0 ** -(VELOCITY_BITS + SPILL_BITS)
_WORD = 1 << 64
# Elements, with 2 MB of scratch memory. A quarter of it was slower (9.7 instead of 7.4 ms per step
# for 2 M parameters).
CHUNK = 1 << 17
_SOURCE = Path(native.__file__).with_name("reversible_momentum.cpp")
_TYPES = {torch.float32: "f32", torch.float64: "f64"}


@dataclass(frozen=True)
class Digest:
    """Sums of x and of u modulo 2^64; any single wrong bit changes one of them."""

    position: int
    velocity: int


@dataclass(frozen=True)
class _Step:
    """Data to reverse a step, in addition to x, u and the stored bits."""

    before: Digest
    scale_G: tuple[float, ...]    # c before the step
    gamma_G: tuple[float, ...]
    # bytes that u lost (> 0) or gained (< 0)
    shift_G: tuple[int, ...]


class ExactMomentum:
    """Position and velocity of a flat parameter vector, with exactly reversible steps.

    `step` advances; `undo_x` and `undo_v`, in this order, reverse the last step. A step is v =
    gamma v - (1 - gamma) g, then w += rate v, per layer. `undo_v` needs a bitwise identical g.

    Args:
        weights: P numbers, float32 or float64.
        dtype: of the result of `weights()` and of gradients; default that of `weights`.
        groups: one slice per layer; together they cover the vector in order.
        keeps: whether steps can be reversed; if False nothing is stored, and a momentum of 0 is
            free.
        engine: "auto" uses compiled kernels if available, "eager" never; results are bitwise
            identical.

    Raises:
        DivergenceError: a gradient is not finite or a number exceeds its range; names step and
            layer.
        ReversalError: a reversed step does not reproduce the digest of the forward pass.

    Example:
        >>> state = ExactMomentum(torch.ones(2), [slice(0, 2)])
        >>> g = torch.tensor([1.0, 2.0])
        >>> state.step(g, [0.1], [0.9])
        >>> state.undo_x([0.1])
        >>> state.undo_v(g)
        >>> state.weights()
        tensor([1., 1.])
    """

    def __init__(self, weights: Tensor, groups: Sequence[slice], *, dtype: torch.dtype | None = None, keeps: bool = True,
                 engine: str = "auto", names: Sequence[str] | None = None) -> None:
        covered = [group.stop for group in groups[:-1]] == [group.start for group in groups[1:]]
        if not groups or groups[0].start != 0 or groups[-1].stop != weights.numel() or not covered:
            raise ValueError(f"Invalid groups: they must cover the {weights.numel()} parameters in order, without gaps")
        self.groups = tuple(groups)
        self.names = tuple(names or (f"layer {index}" for index in range(len(groups))))
        self.dtype = dtype or weights.dtype
        self.keeps = keeps
        self._kernels = kernels_for(weights.device, self.dtype, engine)
        x_P = weights.detach().reshape(-1).double() * 2.0 ** POSITION_BITS
        # A cast to integers would wrap.
        if not bool((x_P.abs() < _LIMIT).all()):
            raise DivergenceError("a starting weight is not finite or at least "
                                  f"2^{62 - POSITION_BITS} in size; scale the model down.")
        self.x_P = x_P.round().to(torch.int64)
        self.u_P = torch.zeros_like(self.x_P)
        self._w_P = torch.empty_like(self.x_P, dtype=self.dtype)
        self._read_weights()
        self.scale_G = (_START,) * len(groups)   # c
        self._steps: list[_Step] = []
        self._spills: list[list[Tensor]] = [[] for _ in groups]
        self._digest = Digest(_sum(self.x_P), 0)
        self.num_steps = 0

    def step(self, grad_P: Tensor, rate_G: Sequence[float], gamma_G: Sequence[float]) -> None:
        """Take a step forward: velocity, then position."""
        self.step_v(grad_P, gamma_G)
        self.step_x(rate_G)

    def step_v(self, grad_P: Tensor, gamma_G: Sequence[float]) -> None:
        """Compute v = gamma v - (1 - gamma) g."""
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
        """Compute w += rate v."""
        self._digest = Digest(self._add_velocity(rate_G, 1), self._digest.velocity)

    def shift_x(self, grad_P: Tensor, factor_G: Sequence[float], sign: int) -> None:
        """Compute w += sign factor g, for steps with an additional term along the gradient."""
        for index, (group, factor) in enumerate(zip(self.groups, factor_G, strict=True)):
            if self._kernels.add_scaled(self.x_P[group], grad_P[group], factor * 2.0 ** POSITION_BITS, sign) is None:
                raise self._diverged(index, "a weight exceeds its range")
        self._read_weights()
        self._digest = Digest(_sum(self.x_P), self._digest.velocity)

    def undo_x(self, rate_G: Sequence[float]) -> None:
        """Reverse the update of the position, to the weights at which the gradient was computed."""
        self._digest = Digest(self._add_velocity(rate_G, -1), self._digest.velocity)
        if self._digest.position != self._steps[-1].before.position:
            raise ReversalError(self.num_steps, "its weights differ from those of the forward pass")

    def undo_v(self, grad_P: Tensor) -> None:
        """Reverse the update of the velocity, given the gradient at `weights()`."""
        last = self._steps[-1]
        velocity = self._add_gradient(grad_P, last.gamma_G, 1)
        for index, shift in enumerate(last.shift_G):
            if shift:
                self._unshift(index, shift, last.gamma_G[index])
        self._digest = Digest(self._digest.position, _sum(self.u_P) if any(last.shift_G) else velocity)
        if self._digest != last.before:
            raise ReversalError(self.num_steps, "its gradient, or the stored bits, differ from those of the forward pass")
        self.scale_G = last.scale_G
        self._steps.pop()
        self.num_steps -= 1

    def weights(self) -> Tensor:
        """Return w, P numbers of the given dtype, as a view that the next step changes."""
        return self._w_P

    def position(self) -> Tensor:
        """Return w in float64, P."""
        return self.x_P.double() * 2.0 ** -POSITION_BITS

    def velocity(self) -> Tensor:
        """Return v in float64, P."""
        v_P = self.u_P.double()
        for group, scale in zip(self.groups, self.scale_G, strict=True):
            v_P[group] *= scale
        return v_P

    def velocity_norms(self) -> list[float]:
        """Return the L2 norm of the velocity of each layer, G, identical in both engines."""
        norms_G = []
        for group, scale in zip(self.groups, self.scale_G, strict=True):
            parts = (part.double() for part in self.u_P[group].split(CHUNK))
            norms_G.append(scale * math.sqrt(sum(float(torch.dot(part, part)) for part in parts)))
        return norms_G

    def digest(self) -> Digest:
        """Compute the digest of the current state."""
        return Digest(_sum(self.x_P), _sum(self.u_P))

    def verify(self) -> None:
        """Raise ReversalError if the state in memory has changed since the last step."""
        if self.digest() != self._digest:
            raise ReversalError(self.num_steps, "its state in memory has changed since")

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for steps in both directions, as tensors and numbers."""
        return {"x": self.x_P.clone(), "u": self.u_P.clone(), "scale": self.scale_G,
                "digest": astuple(self._digest), "steps": [astuple(step) for step in self._steps],
                "spills": [list(parts) for parts in self._spills], "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same groups.

        Raises:
            OptimizerStateError: it has other numbers of parameters, layers or steps.
            ReversalError: its digest does not match.
        """
        self._require_fit(state)
        self.x_P.copy_(state["x"])
        self.u_P.copy_(state["u"])
        self.scale_G, self._digest, self.num_steps = tuple(state["scale"]), Digest(*state["digest"]), state["num_steps"]
        self._steps = [_Step(Digest(*before), tuple(scale), tuple(gamma), tuple(shift))
                       for before, scale, gamma, shift in state["steps"]]
        self._spills = [list(parts) for parts in state["spills"]]
        self.verify()
        self._read_weights()

    def _require_fit(self, state: Mapping[str, Any]) -> None:
        keys = ("x", "u", "scale", "digest", "steps", "spills", "num_steps")
        require_state(state, keys, type(self).__name__, OptimizerStateError)
        for key in ("x", "u"):
            value = state[key]
            if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != self.x_P.shape:
                raise OptimizerStateError(f"{key} of the state is {getattr(value, 'dtype', type(value).__name__)} of shape "
                                          f"{tuple(getattr(value, 'shape', ()))}, and the model needs int64 of shape "
                                          f"{tuple(self.x_P.shape)}; load the state of the same model.")
        lengths = {"scale": len(self.groups), "spills": len(self.groups), "digest": 2}
        if isinstance(state["num_steps"], int) and self.keeps:
            lengths["steps"] = state["num_steps"]
        wrong = [key for key, length in lengths.items()
                 if not isinstance(state[key], tuple | list) or len(state[key]) != length]
        parts = [part for parts in state["spills"] for part in parts] if "spills" not in wrong else []
        if not isinstance(state["num_steps"], int) or not all(isinstance(part, Tensor) for part in parts):
            wrong.append("num_steps or spills")
        elif not all(isinstance(number, int | float) for key in ("scale", "digest") if key not in wrong for number in state[key]):
            wrong.append("scale or digest")
        elif "steps" not in wrong and not all(isinstance(step, tuple | list) and len(step) == 4 for step in state["steps"]):
            wrong.append("steps")
        if wrong:
            raise OptimizerStateError(f"{wrong[0]} of the state is damaged, or of another number of layers or steps; load a "
                                      "complete state of the same model.")

    @property
    def spill_bytes(self) -> int:
        """Return the size of the stored bits in bytes."""
        return sum(part.numel() * part.element_size() for parts in self._spills for part in parts)

    def _decay(self, index: int, gamma: float) -> tuple[float, int]:
        """Return (the new c, bytes that u lost) of the multiplication by gamma."""
        u_P = self.u_P[self.groups[index]]
        if gamma == 0.0:
            if self.keeps:
                self._spills[index].append(u_P.clone())
            u_P.zero_()
            return _START, SPILL_BITS  # all eight bytes
        scale, shift = self.scale_G[index] * gamma, 0
        while scale <= _FLOOR:
            if self.keeps:
                self._spills[index].append((u_P & 255).to(torch.uint8))
            u_P >>= SPILL_BITS
            scale, shift = scale * 256.0, shift + 1
        # gamma above 1: the new low digits are zeros, and need not be stored.
        while scale > _START:
            if int(u_P.abs().max()) >= _LIMIT >> SPILL_BITS:
                raise self._diverged(index, "the velocity exceeds its range")
            u_P <<= SPILL_BITS
            scale, shift = scale / 256.0, shift - 1
        return scale, shift

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
            raise ReversalError(self.num_steps, "the bits stored in that step are missing") from None

    def _add_gradient(self, grad_P: Tensor, gamma_G: Sequence[float], sign: int) -> int:
        """Compute u += sign rint(g (1 - gamma) / c); return the sum of u."""
        total = 0
        for index, (group, gamma) in enumerate(zip(self.groups, gamma_G, strict=True)):
            factor = (1.0 - gamma) / self.scale_G[index]
            found = self._kernels.add_scaled(self.u_P[group], grad_P[group], factor, sign)
            if found is None:
                raise self._diverged(index, "a gradient is not finite or the velocity exceeds its range")
            total += found
        return total % _WORD

    def _add_velocity(self, rate_G: Sequence[float], sign: int) -> int:
        """Compute x += sign rint(u rate c 2^48), then the weights; return the sum of x."""
        total = 0
        for index, (group, rate) in enumerate(zip(self.groups, rate_G, strict=True)):
            factor = rate * self.scale_G[index] * 2.0 ** POSITION_BITS
            found = self._kernels.apply_velocity(self.x_P[group], self.u_P[group], self._w_P[group], factor, sign)
            if found is None:
                raise self._diverged(index, "a weight exceeds its range")
            total += found
        return total % _WORD

    def _read_weights(self) -> None:
        for group in self.groups:
            self._kernels.apply_velocity(self.x_P[group], self.u_P[group], self._w_P[group], 0.0, 1)

    def _diverged(self, index: int, what: str) -> DivergenceError:
        return DivergenceError(f"{self.names[index]}: {what} in step {self.num_steps}; lower the "
                               "learning rate, or limit the change with max_change.")


def _sum(whole_P: Tensor) -> int:
    return int(whole_P.sum()) % _WORD


def kernels_for(device: torch.device, dtype: torch.dtype, engine: str) -> _Eager | Fused:
    """Return the kernels, whose results are bitwise identical; RuntimeError without a compiler.

    Both functions take views of one layer, and return the sum of the resulting integers, or None
    if a number is not finite or exceeds its range.
    """
    if engine not in ("auto", "eager", "fused"):
        raise ValueError(f"Invalid engine: {engine!r}; choose auto, eager or fused")
    if dtype not in _TYPES:
        raise ArgumentError(f"Invalid weights: {dtype}; they must be float32 or float64. Convert the model, as in model.float().")
    if engine == "eager" or device.type != "cpu":
        return _Eager(device)
    library = load_library()
    if library is None and engine == "fused":
        raise RuntimeError(f"{_SOURCE.name} could not be compiled; a C++ compiler is needed")
    return _Eager(device) if library is None else Fused(library)


class _Eager:
    """Torch operations, in chunks, with reused scratch memory."""

    def __init__(self, device: torch.device) -> None:
        # On a GPU launch overhead is more expensive than memory.
        self._size = CHUNK if device.type == "cpu" else 512 * CHUNK
        self._real = torch.empty(0, dtype=torch.float64, device=device)
        self._whole = torch.empty(0, dtype=torch.int64, device=device)

    def add_scaled(self, u_P: Tensor, grad_P: Tensor, factor: float, sign: int) -> int | None:
        """Compute u += sign rint(g factor)."""
        # Some processors convert NaN to 0, which would be undetected.
        if not math.isfinite(float(grad_P.sum())):
            return None
        sums, ends = [], []
        for u_C, grad_C in zip(u_P.split(self._size), grad_P.split(self._size), strict=True):
            self._add(u_C, grad_C, factor, sign)
            sums.append(u_C.sum())
            ends += u_C.aminmax()
        return int(torch.stack(sums).sum()) if _in_range(torch.stack(ends)) else None

    def apply_velocity(self, x_P: Tensor, u_P: Tensor, w_P: Tensor, factor: float, sign: int) -> int | None:
        """Compute x += sign rint(u factor); w = x 2^-48."""
        if not math.isfinite(factor):
            return None
        sums, squares = [], []
        for x_C, u_C, w_C in zip(*(part_P.split(self._size) for part_P in (x_P, u_P, w_P)), strict=True):
            self._add(x_C, u_C, factor, sign)
            sums.append(x_C.sum())
            w_C.copy_(x_C).mul_(2.0 ** -POSITION_BITS)
            squares.append(torch.dot(w_C, w_C))
        # A norm within the range implies weights within it, and is faster than the maximum.
        fits = float(torch.stack(squares).sum()) < (_LIMIT * 2.0 ** -POSITION_BITS) ** 2 or _in_range(x_P)
        return int(torch.stack(sums).sum()) if fits else None

    def _add(self, whole_C: Tensor, values_C: Tensor, factor: float, sign: int) -> None:
        """Compute `whole += sign rint(values factor)`.

        A product beyond 64 bits becomes the largest or smallest integer, depending on the
        processor. Either moves a number within the range out of it, even if the sum wraps around.
        """
        if len(self._real) < len(whole_C):
            self._real, self._whole = self._real.new_empty(len(whole_C)), self._whole.new_empty(len(whole_C))
        real_C, add_C = self._real[:len(whole_C)], self._whole[:len(whole_C)]
        real_C.copy_(values_C).mul_(factor).round_()
        whole_C.add_(add_C.copy_(real_C), alpha=sign)


def _in_range(whole: Tensor) -> bool:
    low, high = whole.aminmax()
    return int(low) > -_LIMIT and int(high) < _LIMIT


class Fused:
    """C++ kernels, with one pass over memory each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add = {dtype: getattr(library, f"add_scaled_{suffix}") for dtype, suffix in _TYPES.items()}
        self._move = {dtype: getattr(library, f"move_{suffix}") for dtype, suffix in _TYPES.items()}

    def add_scaled(self, u_P: Tensor, grad_P: Tensor, factor: float, sign: int) -> int | None:
        total = ctypes.c_int64()
        ok = self._add[grad_P.dtype](ctypes.c_void_p(u_P.data_ptr()), ctypes.c_void_p(grad_P.data_ptr()),
                                     ctypes.c_int64(len(u_P)), ctypes.c_double(factor), ctypes.c_int64(sign), ctypes.byref(total))
        return total.value if ok else None

    def apply_velocity(self, x_P: Tensor, u_P: Tensor, w_P: Tensor, factor: float, sign: int) -> int | None:
        total = ctypes.c_int64()
        ok = self._move[w_P.dtype](ctypes.c_void_p(x_P.data_ptr()), ctypes.c_void_p(u_P.data_ptr()),
                                   ctypes.c_void_p(w_P.data_ptr()), ctypes.c_int64(len(x_P)), ctypes.c_double(factor),
                                   ctypes.c_int64(sign), ctypes.byref(total))
        return total.value if ok else None


def load_library() -> ctypes.CDLL | None:
    # No contraction into fused multiply-adds: bits must equal those of the torch operations.
    return native.library(_SOURCE, "-ffp-contract=off")
