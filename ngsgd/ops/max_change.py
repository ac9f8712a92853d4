"""Limits on how far one minibatch may move the parameters: C.3 of arXiv 1410.7455, and the exact-norm form of Kaldi's nnet3.

Letters: C components (a layer's weight and bias together are one), factors multiply a component's proposed change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """What may be applied of a proposed change, and which limits were met; all tensors, so no device sync is needed."""

    # multiply component c's proposed change by this; includes `scale` and the whole-model limit
    factors_C: Tensor
    # 0-d bool; False: some norm is Inf or NaN, and nothing may be applied
    is_finite: Tensor
    # bool, the component's own limit was active
    layer_hits_C: Tensor
    # 0-d bool, the whole-model limit was active
    model_hit: Tensor


def max_change_limits(norms_C: Tensor, max_changes_C: Tensor, max_param_change: float, *, scale: float = 1.0,
                      max_change_scale: float = 1.0) -> Limits:
    """Factors for adding `scale` times a change whose component norms are `norms_C`.

    `max_changes_C` holds each component's limit, `max_param_change` that of the whole model, 0 meaning none; both are
    L2 norms per minibatch and are multiplied by `max_change_scale`.  Unlike in Kaldi, NaN does not pass.
    """
    size_C = norms_C * abs(scale)
    allowed_C = max_changes_C * max_change_scale
    layer_hits_C = (max_changes_C > 0.0) & (size_C > allowed_C)
    factors_C = torch.where(layer_hits_C, allowed_C / size_C, 1.0)
    total = torch.linalg.vector_norm(factors_C * size_C)
    allowed = max_param_change * max_change_scale
    model_hit = (total > allowed) & (max_param_change > 0.0)
    model_factor = torch.where(model_hit, allowed / total, 1.0)
    # an Inf norm gives factor 0 and 0 * Inf = NaN, which would pass the comparison above: look at
    # the norms themselves
    return Limits(factors_C * model_factor * scale, torch.isfinite(norms_C).all(), layer_hits_C, model_hit)


def row_product_factor(products: Tensor, num_rows: Tensor | float, lr: float, max_change_per_sample: float) -> Tensor:
    """The paper's limit (C.3; Kaldi's nnet2): the factor, at most 1, on the change of one layer.

    `products` is the sum over rows of |xhat_i| |yhat_i|, scales included: times `lr` it bounds the Frobenius norm of the
    change.  The limit is `max_change_per_sample` times the number of rows.
    """
    factor = num_rows * max_change_per_sample / (lr * products)
    # 0: every row was masked, and there is nothing to limit; NaN stays NaN, so that nothing is
    # applied
    return torch.where(products == 0.0, 1.0, factor).clamp(max=1.0)
