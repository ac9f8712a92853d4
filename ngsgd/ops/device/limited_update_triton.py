"""Triton kernels of `ngsgd.ops.device.limited_update`."""

# Triton gives arguments their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ngsgd.ops.device.limited_update import BLOCK


@triton.jit
def _norms(table, partials_T, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    direction = tl.load(table + 4 * tile + 1).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    values = tl.load(direction + i, mask=i < tl.load(table + 4 * tile + 2), other=0.0)
    tl.store(partials_T + tile, tl.sum(values * values))


def direction_norms(directions: Sequence[Tensor], partials_T: Tensor, table: Tensor) -> None:
    """See `ngsgd.ops.device.limited_update.direction_norms`."""
    _norms[(len(table),)](table, partials_T, BLOCK=BLOCK)


@triton.jit
def _limits(partials_T, starts, constants, others, numbers, C, max_param_change, scale, size_scale,
            HAS_OTHERS: tl.constexpr, COMPONENTS: tl.constexpr, BLOCK_T: tl.constexpr):
    c = tl.arange(0, COMPONENTS)
    is_component = c < C
    first = tl.load(starts + c, mask=is_component, other=0)
    num_tiles = tl.load(starts + c + 1, mask=is_component, other=0) - first
    sums_C = tl.zeros([COMPONENTS], dtype=tl.float32)
    for start in range(0, tl.max(num_tiles), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        sums_C += tl.sum(tl.load(partials_T + first[:, None] + t[None, :], mask=t[None, :] < num_tiles[:, None], other=0.0), axis=1)
    rate_C = tl.load(constants + c, mask=is_component, other=0.0)
    limit_C = tl.load(constants + C + c, mask=is_component, other=float("inf")) * tl.abs(scale)
    size_C = tl.sqrt(sums_C) * tl.abs(rate_C) * tl.abs(scale * size_scale)
    ratio_C = limit_C / size_C
    # NaN stays: a comparison with it is false.
    factor_C = tl.where(ratio_C > 1.0, 1.0, ratio_C)
    # An Inf norm has the factor 0, or NaN without a limit; 0 * Inf = NaN.
    limited_C = tl.where(is_component, factor_C * size_C, 0.0)
    total = tl.sqrt(tl.sum(limited_C * limited_C))
    if HAS_OTHERS:
        total = tl.where(tl.load(others).to(tl.int32) != 0, total, float("nan"))
    model_ratio = max_param_change * tl.abs(scale) / total
    factor_C = factor_C * tl.where(model_ratio > 1.0, 1.0, model_ratio) * (scale * size_scale)
    tl.store(numbers + c, ratio_C, mask=is_component)
    tl.store(numbers + C, model_ratio)
    tl.store(numbers + C + 1, total)
    tl.store(numbers + C + 2, tl.where(total >= 0.0, 0.0, 1.0))
    tl.store(numbers + C + 3 + c, factor_C * rate_C, mask=is_component)


def update_limits(partials_T: Tensor, starts: Tensor, constants_2C: Tensor, others_finite: Tensor | None, numbers: Tensor,
                  max_param_change: float, scale: float, size_scale: float) -> None:
    """See `ngsgd.ops.device.limited_update.update_limits`."""
    num_components = constants_2C.shape[1]
    others = numbers if others_finite is None else others_finite
    _limits[(1,)](partials_T, starts, constants_2C, others, numbers, num_components, max_param_change, scale, size_scale,
                  HAS_OTHERS=others_finite is not None, COMPONENTS=triton.next_power_of_2(num_components), BLOCK_T=64)


@triton.jit
def _update(table, numbers, C, BLOCK: tl.constexpr):
    row = table + 4 * tl.program_id(0)
    p = tl.load(row).to(tl.pointer_type(tl.float32))
    direction = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    inside = i < tl.load(row + 2)
    if tl.load(numbers + C + 2) != 0.0:
        tl.store(direction + i, tl.zeros([BLOCK], dtype=tl.float32), mask=inside)
    else:
        step = tl.load(numbers + C + 3 + tl.load(row + 3))
        tl.store(p + i, tl.load(p + i, mask=inside) + step * tl.load(direction + i, mask=inside), mask=inside)


def limited_update(params: Sequence[Tensor], directions: Sequence[Tensor], numbers: Tensor, table: Tensor,
                   components: Sequence[int]) -> None:
    """See `ngsgd.ops.device.limited_update.limited_update`."""
    _update[(len(table),)](table, numbers, (len(numbers) - 3) // 2, BLOCK=BLOCK)
