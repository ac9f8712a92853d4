"""The two inner loops of `ExactMomentum`, in torch operations and in C++; bitwise identical.

Both return the sum of the resulting integers, or None if a number is not finite or exceeds its
range.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ngsgd.errors import ArgumentError
from ngsgd.ops.kernels import native

# Elements, with 2 MB of scratch memory. A quarter of it was slower (9.7 instead of 7.4 ms per step
# for 2 M parameters).
CHUNK = 1 << 17
_LIMIT = float(1 << 62)
_UNIT = 2.0 ** -48  # of a position
_SOURCE = Path(native.__file__).with_name("reversible_momentum.cpp")
_TYPES = {torch.float32: "f32", torch.float64: "f64"}


class Kernels(Protocol):
    """Interface of the loops; all arguments are views of one layer."""

    def add_scaled(self, u_P: Tensor, grad_P: Tensor, factor: float, sign: int) -> int | None:
        """Compute u += sign rint(g factor)."""

    def apply_velocity(self, x_P: Tensor, u_P: Tensor, w_P: Tensor, factor: float,
                       sign: int) -> int | None:
        """Compute x += sign rint(u factor); w = x 2^-48."""


def kernels_for(device: torch.device, dtype: torch.dtype, engine: str) -> Kernels:
    """Return the kernels of `engine`.

    "auto", "eager" or "fused", which raises RuntimeError without a compiler.
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
        # Some processors convert NaN to 0, which would be undetected.
        if not math.isfinite(float(grad_P.sum())):
            return None
        sums, ends = [], []
        for u_C, grad_C in zip(u_P.split(self._size), grad_P.split(self._size), strict=True):
            self._add(u_C, grad_C, factor, sign)
            sums.append(u_C.sum())
            ends += u_C.aminmax()
        return int(torch.stack(sums).sum()) if _in_range(torch.stack(ends)) else None

    def apply_velocity(self, x_P: Tensor, u_P: Tensor, w_P: Tensor, factor: float,
                       sign: int) -> int | None:
        if not math.isfinite(factor):
            return None
        sums, squares = [], []
        for x_C, u_C, w_C in zip(*(part_P.split(self._size) for part_P in (x_P, u_P, w_P)), strict=True):
            self._add(x_C, u_C, factor, sign)
            sums.append(x_C.sum())
            w_C.copy_(x_C).mul_(_UNIT)
            squares.append(torch.dot(w_C, w_C))
        # A norm within the range implies weights within it, and is faster than the maximum.
        fits = float(torch.stack(squares).sum()) < (_LIMIT * _UNIT) ** 2 or _in_range(x_P)
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

    def apply_velocity(self, x_P: Tensor, u_P: Tensor, w_P: Tensor, factor: float,
                       sign: int) -> int | None:
        total = ctypes.c_int64()
        ok = self._move[w_P.dtype](ctypes.c_void_p(x_P.data_ptr()), ctypes.c_void_p(u_P.data_ptr()),
                                   ctypes.c_void_p(w_P.data_ptr()), ctypes.c_int64(len(x_P)), ctypes.c_double(factor),
                                   ctypes.c_int64(sign), ctypes.byref(total))
        return total.value if ok else None


def load_library() -> ctypes.CDLL | None:
    # No contraction into fused multiply-adds: bits must equal those of the torch operations.
    return native.library(_SOURCE, "-ffp-contract=off")
