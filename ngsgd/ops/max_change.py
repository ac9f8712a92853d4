"""Update-norm limits per minibatch.

C.3 of arXiv 1410.7455, and the exact norms of Kaldi's nnet3. Letters: C components (a layer's
weight and bias together are one), factors multiply a component's proposed change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.tensors import require_real


class Limits(NamedTuple):
    """Factors for a proposed change, all tensors; a ratio below 1: the limit was active."""

    # multiplies the proposed change of component c; includes `scale` and the limit of the model
    factors_C: Tensor
    # limit / norm of each component, and of the model
    layer_ratios_C: Tensor
    model_ratio: Tensor
    # 0-d norm of the update of the model before its limit; NaN if a norm is Inf or NaN, and nothing
    # may be applied
    total: Tensor

    @property
    def is_finite(self) -> Tensor:
        """0-d bool; if False, nothing may be applied."""
        return self.total == self.total


def max_change_limits(norms_C: Tensor, max_changes_C: Tensor, max_param_change: float, *,
                      scale: float = 1.0, max_change_scale: float = 1.0) -> Limits:
    """Compute factors for a change of these norms; NaN yields no update, unlike in Kaldi.

    Args:
        norms_C: L2 norms of the component changes.
        max_changes_C: limit of each component (L2 norm per minibatch); inf: none.
        max_param_change: limit of the model; 0: none.
        scale: multiplies the change.
        max_change_scale: multiplies both limits.
    """
    require_real(norms_C, "norms_C", "max_change_limits")
    size_C = norms_C if scale == 1.0 else norms_C * abs(scale)
    allowed_C = max_changes_C if max_change_scale == 1.0 else max_changes_C * max_change_scale
    ratios_C = allowed_C / size_C
    factors_C = ratios_C.clamp(max=1.0)
    # An Inf norm has the factor 0, or NaN without a limit; 0 * Inf = NaN.
    total = torch.linalg.vector_norm(factors_C * size_C)
    # the arithmetic of number / tensor, which torch does in Python
    model_ratio = total.reciprocal() * (max_param_change * max_change_scale or math.inf)
    factors_C = factors_C * model_ratio.clamp(max=1.0)
    return Limits(factors_C if scale == 1.0 else factors_C * scale, ratios_C, model_ratio, total)


def row_product_factor(products: Tensor, num_rows: Tensor | float, lr: float, max_change_per_sample: float) -> Tensor:
    """Return the factor, at most 1, of the limit of the paper on the change of one layer.

    Source: arXiv 1410.7455, C.3; Kaldi's nnet2.

    Args:
        products: sum over rows of |xhat_i| |yhat_i| with scales. Times `lr` it bounds the Frobenius
            norm of the change.
        num_rows: number of rows.
        lr: learning rate.
        max_change_per_sample: limit per row.
    """
    require_real(products, "products", "row_product_factor")
    factor = num_rows * max_change_per_sample / (lr * products)
    # 0: every row was masked, and there is nothing to limit; NaN stays NaN, so nothing is applied.
    return torch.where(products == 0.0, 1.0, factor).clamp(max=1.0)
