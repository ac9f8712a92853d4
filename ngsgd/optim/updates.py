"""Arithmetic of a step for every dtype of parameters; half precision in float32, rounded once,
because torch's CPU kernel of SGD skips it and moments would lose small numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops.tensors import HALF, dense

# The fused kernel of SGD updates these on all devices.
FUSED = frozenset((torch.float32, torch.float64))
COMPLEX = frozenset((torch.complex64, torch.complex128))
DTYPES = (*HALF, torch.float32, torch.float64, torch.complex64, torch.complex128)


def accumulator_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype of velocities and moments: that of the parameter, and at least float32."""
    return torch.float32 if p.dtype in HALF else p.dtype


def accumulator(state: dict[str, Any], key: str, p: Tensor) -> Tensor:
    """Return a tensor of `state` like the parameter, in its dtype and device; zeros at first."""
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
    return all_finite(values) if values else None


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all numbers of the tensors are finite, as a 0-d bool."""
    first = tensors[0]
    if all(tensor.dtype == first.dtype and tensor.device == first.device and tensor.numel() for tensor in tensors):
        # One operation for all; NaN stays NaN.
        return (torch.stack(torch._foreach_norm(list(tensors), math.inf)) < math.inf).all()
    return torch.stack([tensor.isfinite().all().to(first.device) for tensor in tensors]).all()


def replace(p: Tensor, value: Tensor, is_skipped: Tensor) -> None:
    """Set the parameter to the rounded value, except where `is_skipped`."""
    p.copy_(torch.where(is_skipped.to(p.device).bool(), p, value.to(p.dtype)))
