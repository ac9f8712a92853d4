"""GEMMs of large float32 matrices on a CPU, by the faster of the two libraries in torch.

torch's products call MKL, which is limited to AVX2 on AMD processors. oneDNN uses AVX-512: on Zen 5
twice as many multiplications per second, at the same precision. The choice depends only on the
processor and the sizes. `torch.backends.mkldnn.flags(enabled=False)` selects MKL for everything.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from ngsgd.ops.kernels import native

# Multiplications; below, the overhead of oneDNN exceeds the gain.
MIN_PRODUCTS = 1 << 21
BLOCK_ROWS = 256       # rows
thread_buffers = threading.local()


def mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a b, as torch.mm; writes to `out` in blocks of rows, without a temporary of its size.

    Example:
        >>> mm(torch.ones(2, 3), torch.ones(3, 1))
        tensor([[3.],
                [3.]])
    """
    if out is not None:
        _require_shape(out, a_MK, b_KN)
    if not _is_for_onednn(a_MK, b_KN):
        return torch.mm(a_MK, b_KN, out=out)
    b_KN = _plain(b_KN)
    if out is None:
        y_MN: Tensor = _operators()[0](_by_rows(a_MK), b_KN.T, None, "none", [], "")
        return y_MN
    for first in range(0, len(a_MK), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        out[rows] = _operators()[0](_by_rows(a_MK[rows]), b_KN.T, None, "none", [], "")
    return out


def scaled_mm(a_MK: Tensor, b_KN: Tensor, scale: Tensor | float) -> Tensor:
    """Return scale a b; may overwrite b if MKL cannot scale within the product."""
    if isinstance(scale, Tensor) or not b_KN.is_cpu or _is_for_onednn(a_MK, b_KN):
        return mm(a_MK, b_KN.mul_(scale))
    return torch.addmm(_nothing(b_KN.dtype), a_MK, b_KN, beta=0.0, alpha=scale)


def scaled_mv(a_MK: Tensor, b_K: Tensor, scale: Tensor | float) -> Tensor:
    """Return scale a b; may overwrite b."""
    if isinstance(scale, Tensor) or not b_K.is_cpu:
        return torch.mv(a_MK, b_K.mul_(scale))
    return torch.addmv(_nothing(b_K.dtype), a_MK, b_K, beta=0.0, alpha=scale)


def sub_matmul(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return c - a b, in `scratch` if that is faster than new memory; in place if that is c."""
    if scratch is not None:
        _require_shape(scratch, a_MK, b_KN)
    if not _is_for_onednn(a_MK, b_KN) or not c_MN.is_contiguous() or c_MN.dtype != a_MK.dtype:
        return torch.addmm(c_MN, a_MK, b_KN, alpha=-1, out=scratch)
    b_KN = _plain(b_KN)
    # Negate the smaller factor.
    if a_MK.numel() < b_KN.numel():
        # Row-major is faster.
        a_MK = torch.neg(a_MK, out=a_MK.new_empty(a_MK.shape))
    else:
        b_KN = -b_KN
    if scratch is not c_MN:
        y_MN: Tensor = _operators()[1](_by_rows(a_MK), c_MN, b_KN.T, None, "add")
        return y_MN
    for first in range(0, len(c_MN), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        c_MN[rows] = _operators()[1](_by_rows(a_MK[rows]), c_MN[rows], b_KN.T, None, "add")
    return c_MN


def rows_of(x: Tensor) -> Tensor:
    """Flatten all leading dimensions; if there is one, without a view, as slow as a small GEMM."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x W^T + b, as torch.nn.functional.linear, without a backward pass."""
    x_NI = rows_of(x)
    is_ours = is_faster() and _is_for_onednn(x_NI, weight_OI.T)
    y_NO: Tensor = (_operators()[0](_by_rows(x_NI), _plain(weight_OI), bias_O, "none", [], "") if is_ours
                    else torch.nn.functional.linear(x_NI, weight_OI, bias_O))
    # no view, which could not be changed in place behind an autograd function
    return y_NO if x.ndim == 2 else torch.ops.aten._unsafe_view(y_NO, [*x.shape[:-1], len(weight_OI)])


def input_gradient(dY: Tensor, weight_OI: Tensor) -> Tensor:
    """Return dY W in the dtype of dY: the gradient of `linear` with respect to x."""
    dX_NI = mm(rows_of(dY), weight_OI if weight_OI.dtype == dY.dtype else weight_OI.to(dY.dtype))
    return dX_NI if dY.ndim == 2 else dX_NI.view(*dY.shape[:-1], weight_OI.shape[1])


def add_mm(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, keep: float, scale: float) -> None:
    """Compute total <- keep total + scale a b in place."""
    _require_shape(total_MN, a_MK, b_KN)
    if not _is_for_onednn(a_MK, b_KN):
        torch.addmm(total_MN, a_MK, b_KN, beta=keep, alpha=scale, out=total_MN)
    elif keep == 0.0:
        # With keep = 0 the contents of total are undefined.
        torch.mul(mm(a_MK, b_KN), scale, out=total_MN)
    else:
        total_MN.mul_(keep).add_(mm(a_MK, b_KN), alpha=scale)


def _require_shape(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    # Torch would resize it before it is read, and the product would include uninitialized memory.
    if out_MN.shape != (a_MK.shape[0], b_KN.shape[1]):
        raise ValueError(f"Invalid result: {tuple(out_MN.shape)} for the product of {tuple(a_MK.shape)} and {tuple(b_KN.shape)}")


def _is_for_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    return (a_MK.numel() * b_KN.shape[1] >= MIN_PRODUCTS
            and a_MK.dtype == torch.float32 == b_KN.dtype and a_MK.is_cpu and b_KN.is_cpu
            and not (torch.is_grad_enabled() and (a_MK.requires_grad or b_KN.requires_grad))
            and bool(torch.backends.mkldnn.enabled) and is_faster())


def _plain(x: Tensor) -> Tensor:
    """Return the right factor without gaps, with which oneDNN may be 600 times slower."""
    return x if x.is_contiguous() or x.T.is_contiguous() else _copied(x, "right")


def _by_rows(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else _copied(x, "left")


def _copied(x: Tensor, which: str) -> Tensor:
    """Return a copy in a reused buffer: new copies at every step would fragment the heap."""
    kept: Tensor | None = getattr(thread_buffers, which, None)
    if kept is None or kept.numel() < x.numel():
        # A buffer created in inference mode could only be written to in that mode.
        with torch.inference_mode(False):
            kept = x.new_empty(x.numel())
        setattr(thread_buffers, which, kept)
    return kept[:x.numel()].view(x.shape).copy_(x)


@functools.cache
def _nothing(dtype: torch.dtype) -> Tensor:
    """Return the addend, times 0, of a scaled product."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype)


@functools.cache
def _operators() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return Inductor's (x, W, b, ..) -> x W^T + b, and (x, y, W, b, ..) -> x W^T + b + y."""
    name = torch.ops.mkldnn._linear_pointwise
    return name.default, name.binary


@functools.cache
def is_there() -> bool:
    """Return whether this version of torch has the operators."""
    if not torch.backends.mkldnn.is_available():
        return False
    ones = torch.ones(2, 2)
    try:
        affine, added = _operators()
        found = affine(ones, ones, None, "none", [], ""), added(ones, ones, ones, None, "add")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return [float(y[0, 0]) for y in found] == [2.0, 3.0]


@functools.cache
def is_faster() -> bool:
    """Return whether oneDNN uses instructions that MKL does not."""
    return native.is_made_by("AuthenticAMD") and native.capability() == "AVX512" and is_there()
