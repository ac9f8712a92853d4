"""Parts of acoustic models, slowly: float64, loops, straight from the formulas.

Letters: N rows, T frames, D and H dimensions, P classes, S sub-classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

Array = npt.NDArray[np.float64]


def dilated(layer: nn.Linear, x_TD: Tensor, offsets: Sequence[int]) -> Tensor:
    """An affine layer over spliced frames as a dilated convolution, without padding."""
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 1
    assert list(offsets) == list(range(offsets[0], offsets[-1] + 1, step)), "a convolution has evenly spaced taps"
    kernel = layer.weight.detach().double().view(len(layer.weight), len(offsets), -1).transpose(1, 2)
    bias = None if layer.bias is None else layer.bias.detach().double()
    return nn.functional.conv1d(x_TD.double().T[None], kernel, bias, dilation=step)[0].T


def frame_by_frame(network: nn.Sequential, frames: Array, t: int) -> Array:
    """The logits of a TDNN or TDNN-F in test mode at frame `t`; frames repeat at the edges."""
    *time_layers, output = network.children()

    def value(depth: int, at: int) -> Array:
        if depth < 0:
            return np.asarray(frames[min(max(at, 0), len(frames) - 1)])
        layer: Any = time_layers[depth]
        if hasattr(layer, "fixed"):
            below = np.concatenate([value(depth - 1, at + offset) for offset in layer.offsets])
            return np.asarray(layer.fixed.weight.double().numpy() @ below + layer.fixed.bias.double().numpy())
        if hasattr(layer, "factor"):
            middle = [_affine(layer.factor, np.concatenate([value(depth - 1, at + future + past) for past in layer.past]))
                      for future in layer.future]
            y_D = _rest(layer, _affine(layer.affine, np.concatenate(middle)))
            return np.asarray(y_D + layer.bypass_scale * value(depth - 1, at))
        return _rest(layer, _affine(layer.affine, np.concatenate([value(depth - 1, at + offset) for offset in layer.offsets])))
    return _affine(output, value(len(time_layers) - 1, t))


def _affine(layer: Any, x_D: Array) -> Array:
    y = layer.weight.detach().double().numpy() @ x_D
    return np.asarray(y if layer.bias is None else y + layer.bias.detach().double().numpy())


def _rest(layer: Any, x_D: Array) -> Array:
    y_D = np.maximum(x_D, 0.0)
    normalize = layer.rest.normalize
    if hasattr(normalize, "running_mean"):
        return np.asarray((y_D - normalize.running_mean.double().numpy())
                          / np.sqrt(normalize.running_var.double().numpy() + 1e-3))
    return np.asarray(y_D / math.sqrt(max(2.0**-66, float(np.mean(y_D * y_D)))))


def lda(rows_ND: Array, pdf_N: npt.NDArray[np.int64], *, within_class_factor: float, max_singular_value: float) -> Array:
    """The input transform from the rows themselves; covariances by sums of outer products."""
    mean_D = rows_ND.sum(axis=0) / len(rows_ND)
    dim = len(mean_D)
    within, between = np.zeros((dim, dim)), np.zeros((dim, dim))
    for pdf in np.unique(pdf_N):
        members = rows_ND[pdf_N == pdf]
        centre_D = members.sum(axis=0) / len(members)
        between += len(members) * np.outer(centre_D - mean_D, centre_D - mean_D) / len(rows_ND)
        for row_D in members:
            within += np.outer(row_D - centre_D, row_D - centre_D) / len(rows_ND)
    inverse = np.linalg.inv(np.linalg.cholesky(within))
    values, vectors = np.linalg.eigh(inverse @ between @ inverse.T)
    rows = []
    for l, u in sorted(zip(values, vectors.T, strict=True), key=lambda pair: -pair[0]):  # noqa: E741  the formula's name
        rows.append(math.sqrt((within_class_factor + l) / (1.0 + l)) * (u @ inverse))
    left, singular, right = np.linalg.svd(np.array(rows))
    M = left @ np.diag([min(s, max_singular_value) for s in singular]) @ right
    return np.column_stack([M, -M @ mean_D])


def split_targets(counts: Sequence[float], num_subclasses: int, power: float, min_count: float) -> list[int]:
    """GetSplitTargets by looking through all classes each time that are not full."""
    targets, is_open = [1] * len(counts), [True] * len(counts)
    while sum(targets) < num_subclasses and any(is_open):
        best = max((pdf for pdf in range(len(counts)) if is_open[pdf]), key=lambda pdf: counts[pdf] ** power / targets[pdf])
        if (targets[best] + 1) * min_count >= counts[best]:
            is_open[best] = False
        else:
            targets[best] += 1
    return targets


def log_sum_of_softmax(z_NS: Array, targets: Sequence[int]) -> Array:
    """log max(1e-20, sum over a class's sub-classes of the softmax over all sub-classes)."""
    p_NS = np.exp(z_NS - z_NS.max(axis=1, keepdims=True))
    p_NS /= p_NS.sum(axis=1, keepdims=True)
    ends = np.cumsum(targets)
    sums = [p_NS[:, end - number:end].sum(axis=1) for end, number in zip(ends, targets, strict=True)]
    return np.asarray(np.log(np.maximum(np.stack(sums, axis=1), 1e-20)))


def layers_of_kaldi(outer_iter: int, num_layers: int, period: int) -> int:
    """Hidden layers in an outer iteration, by walking through train_pnorm_fast.sh's condition."""
    present = 1
    for x in range(1, outer_iter + 1):
        if x <= (num_layers - 1) * period and (x - 1) % period == 0:
            present += 1
    return present
