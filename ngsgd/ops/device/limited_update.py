"""Limits of a step and its update, in three operators for all parameters of a model.

    |Delta_c|, limits of components and of the model (`ngsgd.ops.max_change`), p <- p + f_c r_c Delta

On a GPU the operators are Triton kernels (`ngsgd.ops.device.limited_update_triton`), which find the
parameters in a table of addresses. Letters: C components, P parameters, T tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.device import triton_kernels
from ngsgd.ops.max_change import Limits, max_change_limits

# Numbers of a tile.
BLOCK = 4096


class Found(NamedTuple):
    """Views of the numbers of a step, in the order of the memory."""

    # see `Limits`
    layer_ratios_C: Tensor
    model_ratio: Tensor
    total: Tensor
    # 1 if the step is skipped
    is_skipped: Tensor
    # factors of the directions
    steps_C: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> Found:
        """Split the memory of 2 C + 3 numbers."""
        num_components = (len(numbers) - 3) // 2
        ratios_C, steps_C = numbers[:num_components], numbers[num_components + 3:]
        return cls(ratios_C, numbers[num_components], numbers[num_components + 1], numbers[num_components + 2], steps_C)


class Layout:
    """Table of the tiles of parameters and their directions.

    Args:
        params: float32 parameters of each component.
        directions: of each parameter, with its strides; static memory.
    """

    def __init__(self, params: Sequence[Sequence[Tensor]], directions: Sequence[Sequence[Tensor]]) -> None:
        self.params = [p for own in params for p in own]
        self.directions = [direction for own in directions for direction in own]
        rows, starts = [], [0]
        for component, (own, along) in enumerate(zip(params, directions, strict=True)):
            rows += [(p.data_ptr() + 4 * first, direction.data_ptr() + 4 * first, min(BLOCK, p.numel() - first), component)
                     for p, direction in zip(own, along, strict=True) for first in range(0, p.numel(), BLOCK)]
            starts.append(len(rows))
        self.components = [component for component, own in enumerate(params) for _ in own]
        device = self.params[0].device
        self.table, self.starts = (triton_kernels.upload(numbers, device) for numbers in (rows, starts))
        self.partials_T = self.params[0].new_empty(len(rows))


def is_supported(params: Sequence[Tensor], directions: Sequence[Tensor]) -> bool:
    """Return whether all are contiguous float32 tensors of one device with these operators."""
    return all(p.dtype == torch.float32 == direction.dtype and p.stride() == direction.stride() and p.numel() > 0
               and p.is_contiguous() for p, direction in zip(params, directions, strict=True)
               ) and len({p.device for p in params}) == 1 and triton_kernels.are_available(params[0].device)


def direction_norms(directions: Sequence[Tensor], partials_T: Tensor, table: Tensor) -> None:
    """Compute the sum of squares of each tile."""
    partials_T.zero_()
    first = 0
    for direction in directions:
        partials_T[first] = torch.linalg.vector_norm(direction).square()
        first += -(-direction.numel() // BLOCK)


def update_limits(partials_T: Tensor, starts: Tensor, constants_2C: Tensor, others_finite: Tensor | None, numbers: Tensor,
                  max_param_change: float, scale: float, size_scale: float) -> None:
    """Compute the limits of a step.

    Args:
        partials_T: of `direction_norms`.
        starts: first tile of each component, and the number of tiles.
        constants_2C: rates, and limits of the components.
        others_finite: whether other updates are finite, as a 0-d bool.
        numbers: set to those of `Found`.
        max_param_change: limit of the model; inf: none.
        scale: multiplies the update and the limits.
        size_scale: multiplies the update alone.
    """
    of_tiles = partials_T.split(starts.diff().tolist())
    norms_C = torch.stack([one.sum() for one in of_tiles]).sqrt() * constants_2C[0].abs()
    limits = max_change_limits(norms_C, constants_2C[1], 0.0 if math.isinf(max_param_change) else max_param_change,
                               scale=scale * size_scale, max_change_scale=abs(scale))
    total = limits.total if others_finite is None else torch.where(others_finite, limits.total, math.nan)
    for own, value in zip(Found.of(numbers), (limits.layer_ratios_C, limits.model_ratio, total, total.isnan(),
                                              limits.factors_C * constants_2C[0]), strict=True):
        own.copy_(value)


def limited_update(params: Sequence[Tensor], directions: Sequence[Tensor], numbers: Tensor, table: Tensor,
                   components: Sequence[int]) -> None:
    """Add the limited directions to the parameters; of a skipped step, set the directions to 0."""
    found = Found.of(numbers)
    is_skipped = found.is_skipped != 0.0
    for p, direction, component in zip(params, directions, components, strict=True):
        p.copy_(torch.where(is_skipped, p, torch.addcmul(p, direction, found.steps_C[component])))
        direction.masked_fill_(is_skipped, 0.0)


triton_kernels.register("limited_update", {
    direction_norms: "Tensor[] directions, Tensor(a!) partials_T, Tensor table",
    update_limits: "Tensor partials_T, Tensor starts, Tensor constants_2C, Tensor? others_finite, "
                   "Tensor(a!) numbers, float max_param_change, float scale, float size_scale",
    limited_update: "Tensor(a!)[] params, Tensor(b!)[] directions, Tensor numbers, Tensor table, "
                    "int[] components"})


def limited_step(layout: Layout, constants_2C: Tensor, max_param_change: float, *, scale: float, size_scale: float,
                 others_finite: Tensor | None) -> tuple[Limits, Tensor]:
    """Update the parameters of a layout.

    Args:
        layout: parameters and their directions.
        constants_2C: rates of the components, and their limits; inf: none.
        max_param_change: limit of the model; 0: none.
        scale: multiplies the update and the limits.
        size_scale: multiplies the update alone.
        others_finite: whether other updates are finite, as a 0-d bool; None: there are none.

    Returns:
        (limits, 1 if the step was skipped).
    """
    numbers = constants_2C.new_empty(2 * constants_2C.shape[1] + 3)
    torch.ops.ngsgd.direction_norms(layout.directions, layout.partials_T, layout.table)
    torch.ops.ngsgd.update_limits(layout.partials_T, layout.starts, constants_2C, others_finite, numbers,
                                  max_param_change or math.inf, scale, size_scale)
    torch.ops.ngsgd.limited_update(layout.params, layout.directions, numbers, layout.table, layout.components)
    # Kernels do not increment the version; autograd would not detect stale tensors.
    torch.autograd.graph.increment_version(layout.params)
    found = Found.of(numbers)
    return Limits(found.steps_C, found.layer_ratios_C, found.model_ratio, found.total), found.is_skipped
