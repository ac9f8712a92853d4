"""Sub-classes (mixture components) in the output layer.

The softmax runs over sub-classes and is summed for each class; the objective is the logarithm of
the sum. Sources: C.5 of arXiv 1410.7455; Kaldi's nnet2/mixup-nnet.cc. Letters: N rows, P classes, S
sub-classes, H inputs of the output layer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Kaldi's floor of the argument of the logarithm.
_MIN_POSTERIOR = 1e-20
# Standard deviation of the perturbation that separates two halves of a row.
_PERTURBATION = 0.01


def split_targets(counts: Sequence[float], num_subclasses: int, power: float = 0.25, min_count: float = 10.0) -> list[int]:
    """Distribute at most `num_subclasses` sub-classes over classes with these numbers of frames.

    The class with the largest count^power / sub-classes gets one more. If the new number times
    `min_count` would reach its count, it gets no more at all. Source: GetSplitTargets of Kaldi's
    gmm/model-common.cc.

    Example:
        >>> split_targets([100.0, 10000.0], 6, power=0.5)
        [1, 5]
    """
    targets = [1] * len(counts)
    # Ties are resolved in class order.
    queue = [(-(count ** power), pdf) for pdf, count in enumerate(counts)]
    heapq.heapify(queue)
    num_left = num_subclasses - len(counts)
    while num_left > 0 and queue:
        _, pdf = heapq.heappop(queue)
        if (targets[pdf] + 1) * min_count < counts[pdf]:
            targets[pdf] += 1
            num_left -= 1
            heapq.heappush(queue, (-(counts[pdf] ** power) / targets[pdf], pdf))
    return targets


def classes_of_subclasses(targets: Sequence[int]) -> list[int]:
    """Return the class of each sub-class; those of one class are adjacent."""
    return [pdf for pdf, number in enumerate(targets) for _ in range(number)]


def split_rows(weight_PH: Tensor, bias_P: Tensor, targets: Sequence[int], generator: torch.Generator, *,
               scales: Sequence[float] = (), perturbation: float = _PERTURBATION) -> tuple[Tensor, Tensor]:
    """Split the row of every class into its number of sub-classes.

    A split halves the probability of the row (bias + log 0.5) and moves its two copies apart by +-
    `perturbation` * randn. The row with the fewest splits of a class is next. Without perturbation
    the posteriors of the classes do not change, even with a fixed scale of each class after the
    layer (`scales`, empty for none).

    Returns:
        (weight S x H, bias S).
    """
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for row_H, bias, number, scale in zip(weight_PH, bias_P, targets, scales or [1.0] * len(targets), strict=True):
        rows, offsets = [row_H], [0.0]
        while len(rows) < number:
            chosen = offsets.index(max(offsets))
            noise_H = perturbation * torch.randn(row_H.shape, generator=generator, dtype=row_H.dtype)
            rows.append(rows[chosen] - noise_H)
            rows[chosen] = rows[chosen] + noise_H
            offsets[chosen] += math.log(0.5) / scale
            offsets.append(offsets[chosen])
        weights += rows
        biases += [bias + offset for offset in offsets]
    return torch.stack(weights), torch.stack(biases)


def prior_scale(counts: Sequence[float], power: float, smoothing: float = 0.01) -> Tensor:
    """Return (count + smoothing * mean count)^power, rescaled to mean 1.

    Kaldi's pre-softmax FixedScale (-0.25).
    """
    counts_P = torch.tensor(counts, dtype=torch.float64)
    scale_P = (counts_P + smoothing * counts_P.mean()) ** power
    return scale_P / scale_P.mean()


class SumSubclasses(nn.Module):
    """Log of the sum over the sub-classes of each class of their softmax, N x S to N x P.

    The exponentials of a row sum to one. The value is floored at log 1e-20. As in Kaldi, the
    derivative ignores the floor, so that very unlikely frames still have a gradient.
    """

    class_S: Tensor

    def __init__(self, targets: Sequence[int]) -> None:
        super().__init__()
        self.num_classes = len(targets)
        self.register_buffer("class_S", torch.tensor(classes_of_subclasses(targets)), persistent=False)

    def forward(self, z_NS: Tensor) -> Tensor:
        """Return log probabilities of the classes."""
        index_NS = self.class_S.expand_as(z_NS)
        nothing_NP = z_NS.new_zeros(z_NS.shape[0], self.num_classes)
        # Each class relative to its largest value; relative to that of the row, unlikely classes
        # would underflow.
        top_NP = nothing_NP.scatter_reduce(1, index_NS, z_NS.detach(), "amax", include_self=False)
        sum_NP = nothing_NP.index_add(1, self.class_S, (z_NS - top_NP.gather(1, index_NS)).exp())
        log_y_NP = sum_NP.log() + top_NP - z_NS.logsumexp(dim=1, keepdim=True)
        return log_y_NP + (log_y_NP.clamp(min=math.log(_MIN_POSTERIOR)) - log_y_NP).detach()

    def extra_repr(self) -> str:
        return f"num_subclasses={len(self.class_S)}, num_classes={self.num_classes}"
