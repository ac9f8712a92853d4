"""Triton kernels of `ngsgd.ops.device.packed_rows`.

Each program reads its row of a table, so that one launch handles sides of all shapes. Products are
sums of float32 products; TF32 would lose the small difference X - H V.
"""

# Triton gives arguments their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ngsgd.ops.device.packed_rows import BLOCK_D, BLOCK_N, CHUNK_N, packing_of

# Ranks up to this one have narrower products.
_SMALL_RANK = 32
_BLOCK_T = 128


@triton.jit
def _matrix(memory, offset, n, d, D, K, IS_INNER: tl.constexpr):
    """Return the addresses of numbers (n, d)."""
    n = n.to(tl.int64)
    if IS_INNER:
        return memory + offset + ((n // K) * D * K + n % K)[:, None] + (d * K)[None, :]
    return memory + offset + (n * D)[:, None] + d[None, :]


@triton.jit
def _project_tile(X, Xhat, H, sums_T2, column_sums, R_LRD, V_LRD, tile, first, offset_sums, offset, N, D, appended, offset_one,
                  factor, offset_h, R, K, stride_r, RANK: tl.constexpr, IS_INNER: tl.constexpr, SUMS: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = first + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    is_row, is_rank = n < N, r < R
    factors = factor + r.to(tl.int64) * stride_r
    one_N = is_row.to(tl.float32)
    H_NR = tl.zeros([BLOCK_N, RANK], dtype=tl.float32)
    sum_sq = 0.0
    for start in range(0, D + appended, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x_ND = tl.load(_matrix(X, offset, n, d, D, K, IS_INNER), mask=is_row[:, None] & (d < D)[None, :], other=0.0)
        # Column D is 1 if one is appended.
        is_one = (d == D) & (d < D + appended)
        x_ND = tl.where(is_one[None, :], one_N[:, None], x_ND)
        r_RD = tl.load(R_LRD + factors[:, None] + d[None, :], mask=is_rank[:, None] & (d < D + appended)[None, :], other=0.0)
        H_NR = tl.dot(x_ND, tl.trans(r_RD), H_NR, input_precision="ieee")
        sum_sq += tl.sum(x_ND * x_ND)
    tl.store(H + offset_h + n.to(tl.int64)[:, None] * R + r[None, :], H_NR, mask=is_row[:, None] & is_rank[None, :])
    sum_sq_hat = 0.0
    for start in range(0, D + appended, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = is_row[:, None] & (d < D)[None, :]
        x_ND = tl.load(_matrix(X, offset, n, d, D, K, IS_INNER), mask=inside, other=0.0)
        is_one = (d == D) & (d < D + appended)
        x_ND = tl.where(is_one[None, :], one_N[:, None], x_ND)
        v_RD = tl.load(V_LRD + factors[:, None] + d[None, :], mask=is_rank[:, None] & (d < D + appended)[None, :], other=0.0)
        x_ND -= tl.dot(H_NR, v_RD, input_precision="ieee")
        tl.store(_matrix(Xhat, offset, n, d, D, K, IS_INNER), x_ND, mask=inside)
        if start + BLOCK_D > D:
            column_N = tl.sum(tl.where(is_one[None, :], x_ND, 0.0), axis=1)
            tl.store(Xhat + offset_one + n, column_N, mask=n < N * appended)
        if SUMS:
            tl.store(column_sums + offset_sums + d, tl.sum(x_ND, axis=0), mask=d < D)
        sum_sq_hat += tl.sum(x_ND * x_ND)
    tl.store(sums_T2 + 2 * tile, sum_sq)
    tl.store(sums_T2 + 2 * tile + 1, sum_sq_hat)


@triton.jit
def _project(X, Xhat, H, sums_T2, column_sums, R_LRD, V_LRD, table, stride_l, stride_r, SMALL: tl.constexpr, RANK: tl.constexpr,
             IS_INNER: tl.constexpr, SUMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    tile = tl.program_id(0)
    row = table + 11 * tile
    first, offset_sums, offset = tl.load(row).to(tl.int32), tl.load(row + 1), tl.load(row + 2)
    N, D, appended = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    offset_one, factor, offset_h = tl.load(row + 6), tl.load(row + 7) * stride_l, tl.load(row + 8)
    R, K = tl.load(row + 9).to(tl.int32), tl.load(row + 10)
    if R <= SMALL:
        _project_tile(X, Xhat, H, sums_T2, column_sums, R_LRD, V_LRD, tile, first, offset_sums, offset, N, D, appended, offset_one,
                      factor, offset_h, R, K, stride_r, SMALL, IS_INNER, SUMS, BLOCK_N, BLOCK_D)
    else:
        _project_tile(X, Xhat, H, sums_T2, column_sums, R_LRD, V_LRD, tile, first, offset_sums, offset, N, D, appended, offset_one,
                      factor, offset_h, R, K, stride_r, RANK, IS_INNER, SUMS, BLOCK_N, BLOCK_D)


def project_rows(X: Tensor, Xhat: Tensor, H: Tensor, sums_T2: Tensor, column_sums: Tensor, R_LRD: Tensor, V_LRD: Tensor,
                 table: Tensor, packing: int) -> None:
    """See `ngsgd.ops.device.packed_rows.project_rows`."""
    own = packing_of(packing)
    rank = max(_SMALL_RANK, triton.next_power_of_2(own.max_rank))
    _project[(len(table),)](X, Xhat, H, sums_T2, column_sums, R_LRD, V_LRD, table, R_LRD.stride(0), R_LRD.stride(1),
                            SMALL=_SMALL_RANK, RANK=rank, IS_INNER=own.is_inner, SUMS=own.sums_columns, BLOCK_N=BLOCK_N,
                            # the fast memory of a processor
                            BLOCK_D=BLOCK_D if rank <= 128 else BLOCK_D // 2)


@triton.jit
def _sum_of(sums_T2, first, num_tiles, column, BLOCK_T: tl.constexpr):
    total = tl.zeros([BLOCK_T], dtype=tl.float32)
    for start in range(0, num_tiles, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        total += tl.load(sums_T2 + 2 * (first + t) + column, mask=t < num_tiles, other=0.0)
    return tl.sum(total)


@triton.jit
def _scale_of(before, after):
    """Return the ratio of norms; 1 for 0 / 0 and x / 0: no rows, or none that remain."""
    scale = before / after
    return tl.where(scale < float("inf"), scale, 1.0)


@triton.jit
def _rescale_layers(Xhat, sums_T2, squares_S, biases, table, CHUNK_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                    BLOCK_T: tl.constexpr):
    row = table + 12 * tl.program_id(0)
    start, tile_in, tile_out, num_tiles = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.int32)
    offset, N, D = tl.load(row + 4), tl.load(row + 5).to(tl.int32), tl.load(row + 6)
    column, bias, first_row = tl.load(row + 7), tl.load(row + 8), tl.load(row + 11).to(tl.int32)
    sum_in, sum_out = _sum_of(sums_T2, tile_in, num_tiles, 0, BLOCK_T), _sum_of(sums_T2, tile_out, num_tiles, 0, BLOCK_T)
    hat_in, hat_out = _sum_of(sums_T2, tile_in, num_tiles, 1, BLOCK_T), _sum_of(sums_T2, tile_out, num_tiles, 1, BLOCK_T)
    scale = _scale_of(tl.sqrt(sum_in) * tl.sqrt(sum_out), tl.sqrt(hat_in) * tl.sqrt(hat_out))
    if start + first_row == 0:
        tl.store(squares_S + tl.load(row + 9), sum_in)
        tl.store(squares_S + tl.load(row + 10), sum_out)
    num_ones = tl.where(column >= 0, N, 0)
    o = start + tl.arange(0, BLOCK_D)
    is_output = o < D
    bias_O = tl.zeros([BLOCK_D], dtype=tl.float32)
    for first in range(first_row, tl.minimum(first_row + CHUNK_N, N), BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        places = offset + n.to(tl.int64)[:, None] * D + o[None, :]
        inside = (n < N)[:, None] & is_output[None, :]
        dY_NO = tl.load(Xhat + places, mask=inside, other=0.0) * scale
        tl.store(Xhat + places, dY_NO, mask=inside)
        one_N = tl.load(Xhat + column + n, mask=n < num_ones, other=0.0)
        bias_O += tl.sum(dY_NO * one_N[:, None], axis=0)
    if column >= 0:
        tl.store(biases + bias + o, bias_O, mask=is_output)


def rescale_layers(Xhat: Tensor, sums_T2: Tensor, squares_S: Tensor, biases: Tensor, table: Tensor, packing: int) -> None:
    """See `ngsgd.ops.device.packed_rows.rescale_layers`."""
    _rescale_layers[(len(table),)](Xhat, sums_T2, squares_S, biases, table, CHUNK_N=CHUNK_N, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
                                   BLOCK_T=_BLOCK_T)


@triton.jit
def _scaled_sums(column_sums, sums_T2, squares_S, totals, table, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_T: tl.constexpr):
    row = table + 7 * tl.program_id(0)
    start, tile, num_tiles, first_sum = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32), tl.load(row + 3)
    D, first_total, side = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    total, total_hat = _sum_of(sums_T2, tile, num_tiles, 0, BLOCK_T), _sum_of(sums_T2, tile, num_tiles, 1, BLOCK_T)
    if start == 0:
        tl.store(squares_S + side, total)
    d = start + tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], dtype=tl.float32)
    for first in range(0, num_tiles, BLOCK_N):
        t = first + tl.arange(0, BLOCK_N)
        of_tiles = tl.load(column_sums + first_sum + t.to(tl.int64)[:, None] * D + d[None, :],
                           mask=(t < num_tiles)[:, None] & (d < D)[None, :], other=0.0)
        sum_D += tl.sum(of_tiles, axis=0)
    tl.store(totals + first_total + d, sum_D * _scale_of(tl.sqrt(total), tl.sqrt(total_hat)), mask=d < D)


def scaled_sums(column_sums: Tensor, sums_T2: Tensor, squares_S: Tensor, totals: Tensor, table: Tensor, packing: int) -> None:
    """See `ngsgd.ops.device.packed_rows.scaled_sums`."""
    _scaled_sums[(len(table),)](column_sums, sums_T2, squares_S, totals, table, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_T=_BLOCK_T)


@triton.jit
def _rescale_filters(Phat, sums_T2, column_sums_T2, squares_S, column_squares_S, gradients, table, BLOCK: tl.constexpr,
                     BLOCK_T: tl.constexpr):
    row = table + 12 * tl.program_id(0)
    block, last, tile, num_tiles = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.int32)
    column_tile, num_column_tiles, side = tl.load(row + 4), tl.load(row + 5).to(tl.int32), tl.load(row + 6)
    D, width, weight, bias = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10)
    sum_in = _sum_of(sums_T2, tile, num_tiles, 0, BLOCK_T)
    hat_in = _sum_of(sums_T2, tile, num_tiles, 1, BLOCK_T)
    sum_out = _sum_of(column_sums_T2, column_tile, num_column_tiles, 0, BLOCK_T)
    hat_out = _sum_of(column_sums_T2, column_tile, num_column_tiles, 1, BLOCK_T)
    scale = _scale_of(tl.sqrt(sum_in) * tl.sqrt(sum_out), tl.sqrt(hat_in) * tl.sqrt(hat_out))
    # Each block of a gradient writes the same numbers.
    tl.store(squares_S + side, sum_in)
    tl.store(column_squares_S + side, sum_out)
    i = block + tl.arange(0, BLOCK)
    # number of the gradient, and its row and column
    number = i - tl.load(row + 11)
    o, c = number // D, number % D
    to = tl.where(c < width, weight + o * width + c, bias + o)
    tl.store(gradients + to, tl.load(Phat + i, mask=i < last, other=0.0) * scale, mask=i < last)


def rescale_filters(Phat: Tensor, sums_T2: Tensor, column_sums_T2: Tensor, squares_S: Tensor, column_squares_S: Tensor,
                    gradients: Tensor, table: Tensor, filters: int, columns: int) -> None:
    """See `ngsgd.ops.device.packed_rows.rescale_filters`."""
    _rescale_filters[(len(table),)](Phat, sums_T2, column_sums_T2, squares_S, column_squares_S, gradients, table,
                                    BLOCK=BLOCK_N * BLOCK_D, BLOCK_T=_BLOCK_T)


@triton.jit
def _products_tile(X, H, J_LRD, partials, partial, start, offset, first_row, N, D, appended, factor, offset_h, R, K, stride_r,
                   RANK: tl.constexpr, IS_INNER: tl.constexpr, CHUNK_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    i, r = tl.arange(0, BLOCK_D), tl.arange(0, RANK)
    d = start + i
    is_rank, is_one = r < R, (d == D) & (d < D + appended)
    J_RD = tl.zeros([RANK, BLOCK_D], dtype=tl.float32)
    for first in range(first_row, tl.minimum(first_row + CHUNK_N, N), BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_row = n < N
        x_ND = tl.load(_matrix(X, offset, n, d, D, K, IS_INNER), mask=is_row[:, None] & (d < D)[None, :], other=0.0)
        x_ND = tl.where(is_one[None, :], is_row.to(tl.float32)[:, None], x_ND)
        h_NR = tl.load(H + offset_h + n.to(tl.int64)[:, None] * R + r[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
        J_RD = tl.dot(tl.trans(h_NR), x_ND, J_RD, input_precision="ieee")
    if partial < 0:
        tl.store(J_LRD + factor + r.to(tl.int64)[:, None] * stride_r + d[None, :], J_RD,
                 mask=is_rank[:, None] & (d < D + appended)[None, :])
    else:
        tl.store(partials + partial + r[:, None] * BLOCK_D + i[None, :], J_RD, mask=is_rank[:, None])


@triton.jit
def _products(X, H, squares_S, J_LRD, sum_sq_L, partials, table, stride_l, stride_r, SMALL: tl.constexpr, RANK: tl.constexpr,
              IS_INNER: tl.constexpr, CHUNK_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    row = table + 13 * tl.program_id(0)
    start, side, offset, N = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.int32)
    D, appended, place = tl.load(row + 4), tl.load(row + 5), tl.load(row + 7)
    offset_h, R, K = tl.load(row + 8), tl.load(row + 9).to(tl.int32), tl.load(row + 10)
    first_row, partial = tl.load(row + 11).to(tl.int32), tl.load(row + 12)
    if R <= SMALL:
        _products_tile(X, H, J_LRD, partials, partial, start, offset, first_row, N, D, appended, place * stride_l, offset_h, R, K,
                       stride_r, SMALL, IS_INNER, CHUNK_N, BLOCK_N, BLOCK_D)
    else:
        _products_tile(X, H, J_LRD, partials, partial, start, offset, first_row, N, D, appended, place * stride_l, offset_h, R, K,
                       stride_r, RANK, IS_INNER, CHUNK_N, BLOCK_N, BLOCK_D)
    if start + first_row == 0:
        tl.store(sum_sq_L + place, tl.load(squares_S + side).to(tl.float64))


def row_products(X: Tensor, H: Tensor, squares_S: Tensor, J_LRD: Tensor, sum_sq_L: Tensor, partials: Tensor, table: Tensor,
                 packing: int, moving: int) -> None:
    """See `ngsgd.ops.device.packed_rows.row_products`."""
    own = packing_of(packing)
    _products[(len(table),)](X, H, squares_S, J_LRD, sum_sq_L, partials, table, J_LRD.stride(0), J_LRD.stride(1),
                             SMALL=_SMALL_RANK, RANK=max(_SMALL_RANK, triton.next_power_of_2(own.max_rank)),
                             IS_INNER=own.is_inner, CHUNK_N=CHUNK_N, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D)


@triton.jit
def _sum_products(partials, J_LRD, table, stride_l, stride_r, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = table + 6 * tl.program_id(0)
    start, width, place, R = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.int32)
    partial, num_chunks = tl.load(row + 4), tl.load(row + 5).to(tl.int32)
    i = tl.arange(0, BLOCK_D)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        J_RD = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
        for chunk in range(num_chunks):
            J_RD += tl.load(partials + partial + chunk * R * BLOCK_D + r[:, None] * BLOCK_D + i[None, :],
                            mask=(r < R)[:, None], other=0.0)
        tl.store(J_LRD + place * stride_l + r[:, None] * stride_r + start + i[None, :], J_RD,
                 mask=(r < R)[:, None] & (start + i < width)[None, :])


def sum_products(partials: Tensor, J_LRD: Tensor, table: Tensor) -> None:
    """See `ngsgd.ops.device.packed_rows.sum_products`."""
    _sum_products[(len(table),)](partials, J_LRD, table, J_LRD.stride(0), J_LRD.stride(1), BLOCK_R=16, BLOCK_D=BLOCK_D)
