"""Limits on how far one minibatch may move the parameters: C.3 of arXiv 1410.7455, and the exact-norm form of Kaldi's nnet3.

Letters: C components (a layer's weight and bias together are one), factors multiply a component's proposed change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """What may be applied of a proposed change; all tensors, so nothing waits for a device.

    A ratio below 1 means that the limit was active.
    """

    # multiply component c's proposed change by this; includes `scale` and the whole-model limit
    factors_C: Tensor
    # limit / size of each component, and of the model
    layer_ratios_C: Tensor
    model_ratio: Tensor
    # 0-d, size of the model's change before its own limit; NaN: some norm is Inf or NaN, and
    # nothing may be applied
    total: Tensor

    @property
    def is_finite(self) -> Tensor:
        """0-d bool; False: nothing may be applied."""
        return self.total == self.total

    @property
    def layer_hits_C(self) -> Tensor:  # noqa: N802  the letter says its shape
        """Bool, the component's own limit was active."""
        return self.layer_ratios_C < 1.0

    @property
    def model_hit(self) -> Tensor:
        """0-d bool, the whole-model limit was active."""
        return self.model_ratio < 1.0


def max_change_limits(norms_C: Tensor, max_changes_C: Tensor, max_param_change: float, *,
                      scale: float = 1.0, max_change_scale: float = 1.0) -> Limits:
    """Factors for adding `scale` times a change whose component norms are `norms_C`.

    `max_changes_C` holds each component's limit (inf: none), `max_param_change` that of the whole
    model (0: none); both are L2 norms per minibatch and are multiplied by `max_change_scale`.
    Unlike in Kaldi, NaN does not pass.
    """
    size_C = norms_C if scale == 1.0 else norms_C * abs(scale)
    allowed_C = max_changes_C if max_change_scale == 1.0 else max_changes_C * max_change_scale
    ratios_C = allowed_C / size_C
    factors_C = ratios_C.clamp(max=1.0)
    # an Inf norm has the factor 0, or NaN without a limit; 0 * Inf = NaN
    total = torch.linalg.vector_norm(factors_C * size_C)
    model_ratio = (max_param_change * max_change_scale or math.inf) / total
    factors_C = factors_C * model_ratio.clamp(max=1.0)
    return Limits(factors_C if scale == 1.0 else factors_C * scale, ratios_C, model_ratio, total)


def row_product_factor(products: Tensor, num_rows: Tensor | float, lr: float, max_change_per_sample: float) -> Tensor:
    """The paper's limit (C.3; Kaldi's nnet2): the factor, at most 1, on the change of one layer.

    `products` is the sum over rows of |xhat_i| |yhat_i|, scales included: times `lr` it bounds the Frobenius norm of the
    change.  The limit is `max_change_per_sample` times the number of rows.
    """
    factor = num_rows * max_change_per_sample / (lr * products)
    # 0: every row was masked, and there is nothing to limit; NaN stays NaN, so that nothing is
    # applied
    return torch.where(products == 0.0, 1.0, factor).clamp(max=1.0)
