"""Triton kernels of `ngsgd.ops.polar_update`, in float64; a program for each estimate."""

# Triton gives arguments their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Rows of a matrix that a program reads at once.
_BLOCK_R = 16


@triton.jit
def _norm(matrix, R, SIZE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the Frobenius norm of a contiguous R x R matrix."""
    c = tl.arange(0, SIZE)
    sums = tl.zeros([SIZE], dtype=tl.float64)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        values = tl.load(matrix + r[:, None] * R + c[None, :], mask=(r < R)[:, None] & (c < R)[None, :], other=0.0)
        sums += tl.sum(values * values, axis=0)
    return tl.sqrt(tl.sum(sums))


@triton.jit
def _trace(matrix, R, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    return tl.sum(tl.load(matrix + i * (R + 1), mask=i < R, other=0.0))


@triton.jit
def _kept(M_LRR, rho_L, keep_L, found_LRR, R, SIZE: tl.constexpr, BLOCK_R: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    rho, keep = tl.load(rho_L + one), tl.load(keep_L + one)
    c = tl.arange(0, SIZE)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        places, inside = one * R * R + r[:, None] * R + c[None, :], (r < R)[:, None] & (c < R)[None, :]
        values = tl.load(M_LRR + places, mask=inside, other=0.0) + tl.where(r[:, None] == c[None, :], rho, 0.0)
        tl.store(found_LRR + places, (values * keep).to(found_LRR.dtype.element_ty), mask=inside)


def polar_kept(M_LRR: Tensor, rho_L: Tensor, keep_L: Tensor, found_LRR: Tensor) -> None:
    """See `ngsgd.ops.polar_update.polar_kept`."""
    L, R, _ = M_LRR.shape
    _kept[(L,)](M_LRR, rho_L, keep_L, found_LRR, R, SIZE=triton.next_power_of_2(R), BLOCK_R=_BLOCK_R)


@triton.jit
def _roots_start(Z_LRR, factor_L, now_L3RR, inverse_root_L, R, SIZE: tl.constexpr, BLOCK_R: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_L + one)
    size = _norm(Z_LRR + one * R * R, R, SIZE, BLOCK_R) * tl.abs(factor)
    tl.store(inverse_root_L + one, 1.0 / tl.sqrt(size))
    c = tl.arange(0, SIZE)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        within, inside = r[:, None] * R + c[None, :], (r < R)[:, None] & (c < R)[None, :]
        values = tl.load(Z_LRR + one * R * R + within, mask=inside, other=0.0) * factor
        tl.store(Z_LRR + one * R * R + within, values, mask=inside)
        identity = tl.where(r[:, None] == c[None, :], 1.0, 0.0).to(tl.float64)
        tl.store(now_L3RR + (3 * one + 1) * R * R + within, identity, mask=inside)
        tl.store(now_L3RR + (3 * one + 2) * R * R + within, values / size, mask=inside)


def polar_roots_start(Z_LRR: Tensor, factor_L: Tensor, now_L3RR: Tensor, inverse_root_L: Tensor) -> None:
    """See `ngsgd.ops.polar_update.polar_roots_start`."""
    L, R, _ = Z_LRR.shape
    _roots_start[(L,)](Z_LRR, factor_L, now_L3RR, inverse_root_L, R, SIZE=triton.next_power_of_2(R), BLOCK_R=_BLOCK_R)


@triton.jit
def _spectrum(S_LRR, square_LRR, sum_sq_L, shares_4L, numbers_6L, M_LRR, rho_L, is_finite_L, L, R, stride_s, SIZE: tl.constexpr,
              BLOCK_R: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    M, S = M_LRR + one * R * R, S_LRR + one * stride_s
    dim, rest = tl.load(numbers_6L + one), tl.load(numbers_6L + L + one)
    epsilon, delta = tl.load(numbers_6L + 4 * L + one), tl.load(numbers_6L + 5 * L + one)
    old_rho = tl.load(rho_L + one)
    trace_F = _trace(M, R, SIZE) + dim * old_rho
    trace_T = tl.load(shares_4L + L + one) * trace_F + tl.load(shares_4L + one) * tl.load(sum_sq_L + one)
    rho = (trace_T - _trace(S, R, SIZE)) / rest
    largest = tl.sqrt(tl.sqrt(_norm(square_LRR + one * R * R, R, SIZE, BLOCK_R)))
    # Inf - Inf and NaN - NaN are NaN.
    is_finite = (rho + largest) - (rho + largest) == 0.0
    rank, num_new = (dim - rest).to(tl.int32), tl.where(is_finite, R, 0)
    c = tl.arange(0, SIZE)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        within, inside = r[:, None] * R + c[None, :], (r < R)[:, None] & (c < R)[None, :]
        is_diagonal = (r[:, None] == c[None, :]) & (r < rank)[:, None]
        new = tl.load(S + within, mask=inside, other=0.0) - tl.where(is_diagonal, rho, 0.0)
        tl.store(M + within, new, mask=inside & (r < num_new)[:, None])
    floor = tl.where(delta * largest > epsilon, delta * largest, epsilon)
    tl.store(rho_L + one, tl.where(is_finite, tl.where(rho > floor, rho, floor), old_rho))
    tl.store(is_finite_L + one, is_finite)


def polar_spectrum(S_LRR: Tensor, square_LRR: Tensor, sum_sq_L: Tensor, shares_4L: Tensor, numbers_6L: Tensor, M_LRR: Tensor,
                   rho_L: Tensor, is_finite_L: Tensor) -> None:
    """See `ngsgd.ops.polar_update.polar_spectrum`."""
    L, R, _ = M_LRR.shape
    _spectrum[(L,)](S_LRR, square_LRR, sum_sq_L, shares_4L, numbers_6L, M_LRR, rho_L, is_finite_L, L, R, S_LRR.stride(0),
                    SIZE=triton.next_power_of_2(R), BLOCK_R=_BLOCK_R)


@triton.jit
def _inverse_start(M_LRR, square_LRR, rho_L, numbers_6L, PA_LRR, B_LRR, ratio_L, L, R, SIZE: tl.constexpr, BLOCK_R: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    M = M_LRR + one * R * R
    beta = tl.load(numbers_6L + 2 * L + one) * tl.load(rho_L + one) + tl.load(numbers_6L + 3 * L + one) * _trace(M, R, SIZE)
    largest = beta + tl.sqrt(_norm(square_LRR + one * R * R, R, SIZE, BLOCK_R))
    tl.store(ratio_L + one, beta / largest)
    c = tl.arange(0, SIZE)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        within, inside = r[:, None] * R + c[None, :], (r < R)[:, None] & (c < R)[None, :]
        is_diagonal = r[:, None] == c[None, :]
        values = (tl.load(M + within, mask=inside, other=0.0) + tl.where(is_diagonal, beta, 0.0)) / largest
        tl.store(B_LRR + one * R * R + within, values, mask=inside)
        tl.store(PA_LRR + 2 * one * R * R + within, tl.where(is_diagonal, 1.0, 0.0).to(tl.float64), mask=inside)
        tl.store(PA_LRR + (2 * one + 1) * R * R + within, values, mask=inside)


def polar_inverse_start(M_LRR: Tensor, square_LRR: Tensor, rho_L: Tensor, numbers_6L: Tensor, PA_LRR: Tensor, B_LRR: Tensor,
                        ratio_L: Tensor) -> None:
    """See `ngsgd.ops.polar_update.polar_inverse_start`."""
    L, R, _ = M_LRR.shape
    _inverse_start[(L,)](M_LRR, square_LRR, rho_L, numbers_6L, PA_LRR, B_LRR, ratio_L, L, R, SIZE=triton.next_power_of_2(R),
                         BLOCK_R=_BLOCK_R)
