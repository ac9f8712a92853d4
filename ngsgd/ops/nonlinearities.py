"""P-norms and row norms, forward and backward, in one pass over memory each on a CPU.

Torch operations take three to ten passes: a tenth of a training step in Kaldi's p-norm recipe. They
compute the same in other dtypes than float32, on other devices, in recorded or compiled graphs, and
without a compiler. Letters: N rows of D numbers; any leading dimensions make rows.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngsgd.errors import ArgumentError
from ngsgd.ops.kernels import native

# relative to target_rms^2; Kaldi's floor
MIN_MEAN_SQUARE = 2.0**-66
SOURCE = Path(__file__).with_name("kernels") / "nonlinearities.cpp"


def p_norm(x: Tensor, group: int) -> Tensor:
    """Return 2-norms of consecutive groups of the last dimension."""
    groups = x.unflatten(-1, (-1, group))
    if not _is_native(x):
        y: Tensor = torch.linalg.vector_norm(groups, dim=-1)
        return y
    y = x.new_empty(groups.shape[:-1])
    load_library().p_norm(x.data_ptr(), y.numel(), group, y.data_ptr(), torch.get_num_threads())
    return y


def p_norm_gradient(x: Tensor, y: Tensor, dY: Tensor, group: int) -> Tensor:
    """Return the gradient with respect to x, given y = p_norm(x); 0 for y = 0, as in Kaldi."""
    if y.shape != dY.shape or y.numel() * group != x.numel():
        raise ArgumentError(f"Invalid shapes: x {tuple(x.shape)}, y {tuple(y.shape)}, dY {tuple(dY.shape)} for groups of {group}")
    if not _is_native(x, y, dY):
        share = torch.where(y > 0.0, dY / y, 0.0)
        dX: Tensor = (x.unflatten(-1, (-1, group)) * share.unsqueeze(-1)).flatten(-2)
        return dX
    dX = torch.empty_like(x)
    load_library().p_norm_gradient(x.data_ptr(), y.data_ptr(), dY.data_ptr(), y.numel(), group,
                                   dX.data_ptr(), torch.get_num_threads())
    return dX


def renormalize(x: Tensor, target_rms: float) -> Tensor:
    """Return x * r for each row, r = 1 / max(rms(x) / target, floor)."""
    if not _is_native(x):
        return (x * inverse_rms(x, target_rms)[0]).to(x.dtype)
    y = torch.empty_like(x)
    load_library().renormalize(x.data_ptr(), *_sizes(x, target_rms), MIN_MEAN_SQUARE, y.data_ptr(), torch.get_num_threads())
    return y


def renormalize_gradient(x: Tensor, dY: Tensor, target_rms: float) -> Tensor:
    """Return the gradient with respect to x; r counts as constant if the floor is active."""
    if x.shape != dY.shape:
        raise ArgumentError(f"Invalid shapes: x {tuple(x.shape)} and dY {tuple(dY.shape)}")
    if not _is_native(x, dY):
        r, c = inverse_rms(x, target_rms)
        along = c * torch.linalg.vecdot(x, dY).unsqueeze(-1)
        return torch.addcmul(dY * r, x.to(r.dtype), along, value=-1).to(x.dtype)
    dX = torch.empty_like(x)
    load_library().renormalize_gradient(x.data_ptr(), dY.data_ptr(), *_sizes(x, target_rms),
                                        MIN_MEAN_SQUARE, dX.data_ptr(), torch.get_num_threads())
    return dX


def inverse_rms(x: Tensor, target_rms: float) -> tuple[Tensor, Tensor]:
    """Return (r, c) for each row: r = target / rms, floored; -c x = dr/dx, 0 at the floor."""
    size = x.shape[-1] * target_rms**2
    # Half precision would overflow in the sum of squares.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    r = (norm.square() / size).clamp(min=MIN_MEAN_SQUARE).rsqrt()
    return r, torch.where(r < MIN_MEAN_SQUARE**-0.5, r**3 / size, 0.0)


def is_native() -> bool:
    """Return whether there is compiled code for this processor; compiles it if necessary."""
    return load_library() is not None


def _sizes(x: Tensor, target_rms: float) -> tuple[int, int, float]:
    """Return (N, D, sum of squares of a row at its target)."""
    return x.numel() // x.shape[-1], x.shape[-1], x.shape[-1] * target_rms**2


def _is_native(*tensors: Tensor) -> bool:
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and all(
        type(x) is Tensor and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() and bool(x.numel())
        for x in tensors) and native.is_allowed() and load_library() is not None


@functools.cache
def load_library() -> Any:
    """Load the kernel; None without a compiler."""
    a, n, real, threads = native.ADDRESS, native.NUMBER, native.REAL, native.THREADS
    return native.threaded(SOURCE, p_norm=(None, a, n, n, a, threads), p_norm_gradient=(None, a, a, a, n, n, a, threads),
                           renormalize=(None, a, n, n, real, real, a, threads),
                           renormalize_gradient=(None, a, a, n, n, real, real, a, threads))
