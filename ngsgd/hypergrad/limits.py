"""The limits on change of one step, and the adjoint of a limited move.  Letters: P parameters, G layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Shortened(NamedTuple):
    """By what the changes of a step were multiplied."""

    layer_G: tuple[float, ...]  # 1: not limited
    model: float

    def rates(self, lr_G: Sequence[float]) -> list[float]:
        """What each layer's velocity is multiplied by."""
        return [self.model * factor * lr for factor, lr in zip(self.layer_G, lr_G, strict=True)]


def shorten(norms_G: Sequence[float], lr_G: Sequence[float], max_change_G: Sequence[float], max_param_change: float) -> Shortened:
    """Factors for velocities of these norms; a limit of 0 is none."""
    sizes_G = [lr * norm for lr, norm in zip(lr_G, norms_G, strict=True)]
    layer_G = tuple(limit / size if 0.0 < limit < size else 1.0 for size, limit in zip(sizes_G, max_change_G, strict=True))
    total = math.sqrt(sum((factor * size) ** 2 for factor, size in zip(layer_G, sizes_G, strict=True)))
    return Shortened(layer_G, max_param_change / total if 0.0 < max_param_change < total else 1.0)


class MoveAdjoint(NamedTuple):
    """Derivatives of w + S s_l lr_l v_l, given that by its result."""

    dv_P: Tensor              # to be added to the velocity's
    lr_G: Tensor
    max_change_G: Tensor
    max_param_change: Tensor  # 0-d


def move_adjoint(dw_P: Tensor, v_P: Tensor, groups: Sequence[slice], lr_G: Sequence[float], shortened: Shortened) -> MoveAdjoint:
    """Where a layer's limit holds, its change has a fixed length, so its learning rate has no effect."""
    none = dw_P.new_zeros(())
    d_model = none
    if shortened.model < 1.0:
        change_P = torch.cat([v_P[group] * (factor * lr)
                              for group, lr, factor in zip(groups, lr_G, shortened.layer_G, strict=True)])
        unit_P = change_P / change_P.norm()
        d_model = torch.dot(unit_P, dw_P)
        dw_P = shortened.model * (dw_P - unit_P * d_model)
    dv_P, d_lr_G, d_limit_G = torch.empty_like(v_P), [], []
    for group, lr, factor in zip(groups, lr_G, shortened.layer_G, strict=True):
        d_change, v = dw_P[group], v_P[group]
        d_limit_G.append(none)
        if factor < 1.0:
            unit = v / v.norm()
            d_limit_G[-1] = torch.dot(unit, d_change)
            d_change = factor * (d_change - unit * d_limit_G[-1])
        d_lr_G.append(torch.dot(d_change, v) if factor == 1.0 else none)
        torch.mul(d_change, lr, out=dv_P[group])
    return MoveAdjoint(dv_P, torch.stack(d_lr_G), torch.stack(d_limit_G), d_model)
