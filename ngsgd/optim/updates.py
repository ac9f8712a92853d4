"""Arithmetic of a step for every dtype of parameters.

Fused kernels update float32 and float64. In torch 2.13 the CPU kernel of SGD leaves the vector part
of half-precision tensors unchanged, and moments in half precision lose small numbers. So half
precision is computed in float32 and rounded once. Complex parameters are updated as pairs of real
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops.tensors import HALF, dense

# The fused kernel of SGD updates these on all devices.
FUSED = frozenset((torch.float32, torch.float64))
COMPLEX = frozenset((torch.complex64, torch.complex128))
DTYPES = (*HALF, torch.float32, torch.float64, torch.complex64, torch.complex128)
# Parameters stay finite under 1e8 steps of this fraction of the largest number.
_LARGEST_STEP = 1e-8


def accumulator_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype of velocities and moments: that of the parameter, and at least float32."""
    return torch.float32 if p.dtype in HALF else p.dtype


def accumulator(state: dict[str, Any], key: str, p: Tensor) -> Tensor:
    """Return a tensor of `state` like the parameter, zeros at first.

    It follows the parameter to another dtype and device, as after `model.double()`.
    """
    found: Tensor | None = state.get(key)
    # The most frequent case.
    if found is not None and found.dtype == p.dtype and found.device == p.device and p.dtype not in HALF:
        return found
    dtype = accumulator_dtype(p)
    if found is None:
        found = state[key] = torch.zeros_like(p, dtype=dtype)
    elif found.dtype != dtype or found.device != p.device:
        found = state[key] = found.to(p.device, dtype)
    return found


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as a view with a last dimension of 2; others unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def laid_out_gradient(p: Tensor) -> Tensor:
    """Return the gradient with the strides of the parameter; without a copy if they are equal."""
    assert p.grad is not None
    grad = dense(p.grad)
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)


def gradients_are_finite(params: Iterable[Tensor]) -> Tensor | None:
    """Return a 0-d bool; None if no parameter has a gradient."""
    values = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
    finite = [value.isfinite().all() for value in values]
    return torch.stack([one.to(finite[0].device) for one in finite]).all() if finite else None


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all numbers of the tensors are finite, as a 0-d bool."""
    return torch.stack([tensor.isfinite().all().to(tensors[0].device) for tensor in tensors]).all()


def is_fused(p: Tensor, direction: Tensor) -> bool:
    """Return whether the fused kernel of SGD updates the parameter.

    float16 overflows at 65504, so that its new values are checked first.
    """
    return p.dtype == direction.dtype and (p.dtype not in HALF or (p.dtype == torch.bfloat16 and p.is_cuda))


def largest_update(dtypes: Iterable[torch.dtype]) -> float:
    """Return the norm of an update above which parameters might not stay finite."""
    # New values in float16 are checked one by one.
    return _LARGEST_STEP * min(torch.finfo(torch.float32 if dtype == torch.float16 else dtype).max for dtype in dtypes)


def replace(p: Tensor, value: Tensor, is_skipped: Tensor) -> None:
    """Set the parameter to the rounded value, except where `is_skipped`."""
    p.copy_(torch.where(is_skipped.to(p.device).bool(), p, value.to(p.dtype)))


class DeviceNumbers:
    """Constant vectors on devices; they are copied there only when they change."""

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}

    def __call__(self, like: Tensor, *values: float, dtype: torch.dtype | None = None) -> Tensor:
        key = (values, dtype or like.dtype, like.device)
        found = self._known.get(key)
        if found is None:
            # Remove learning rates of past scheduler steps.
            if len(self._known) > 1000:
                self._known.clear()
            found = self._known[key] = torch.tensor(values, dtype=dtype or like.dtype, device=like.device)
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Copies of an optimizer make their own.
        return {"_known": {}}
