"""The parameter delta of a job, entry by entry: how far it went, and how far it could have gone.

The worker measures it next to the digest, from the vector that it sends, so that a result can be
judged by a few numbers wherever its vector is kept (`ngsgd.training.validation.plausibility`).

Letters: E entries of the layout that the result holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from ngsgd.config import OptimizerConfig
from ngsgd.optim import SGD
from ngsgd.training.parameter_vector import FlatLayout, Pieces, Vector

# elements: three float32 chunks fit into the cache of a core
_CHUNK = 1 << 16
# of one step, relative to the parameters: half an ulp, doubled
_ROUNDING = 2.0**-23
# relative error of the norms that the optimizer computes in float32
_NORM_ERROR = 1e-3

PartOfStart = Callable[[slice], Vector]


class ChangeLimits(NamedTuple):
    """The longest delta that update-norm clipping allows; Inf: no limit is known."""

    # by name of the entry; entries without a limit are missing
    entries: Mapping[str, float]
    # of the entries in `entries` together
    model: float
    # share of the start that the job may take off before its first minibatch
    shrinkage: float
    # share of the parameters by which float32 rounding may add to a delta
    rounding: float


NO_LIMITS = ChangeLimits({}, math.inf, 0.0, 0.0)


@dataclass(frozen=True)
class Deltas:
    """Norms of one result; all L2, float64."""

    norms_E: npt.NDArray[np.float64]  # of end - start
    # component of end - start in the direction of the start
    along_E: npt.NDArray[np.float64]
    starts_E: npt.NDArray[np.float64]  # of the start
    # the longest delta possible; Inf: not known
    limits_E: npt.NDArray[np.float64]
    # the same for all entries with a limit together
    limit: float


def change_limits(
    model: nn.Module, optimizer: SGD, settings: OptimizerConfig, num_minibatches: int, lr: float
) -> ChangeLimits:
    """The bounds of update-norm clipping on the delta of a job of so many minibatches.

    Each step changes a component by at most max_change and the whole model by at most
    max_param_change, in L2 norm; momentum and weight decay are part of the change that is clipped
    (`ngsgd.ops.max_change`).  By the triangle inequality a job of M minibatches changes a component
    by at most M max_change, and any set of components by at most M max_param_change.  Backstitch
    makes two steps per minibatch, which scale the limits by alpha and 1 + alpha: 1 + 2 alpha in
    all.  `proportional_shrink` first removes a share of the start.

    Entries without a bound: buffers such as the statistics of batch normalization; matrices under
    the orthonormal constraint, which is applied after the step; parameters that the optimizer does
    not have; the second name of a shared parameter.
    """
    steps = num_minibatches * (1.0 + 2.0 * settings.backstitch_scale) * (1.0 + _NORM_ERROR)
    of_model = optimizer.max_param_change or math.inf
    bounds = {
        id(p): steps * min(group["max_change"] or math.inf, of_model)
        for group in optimizer.param_groups
        for p in group["params"]
        if not (group["orthonormal_constraint"] and p.ndim > 1)
    }
    entries = {name: bounds[id(p)] for name, p in model.named_parameters() if id(p) in bounds}
    return ChangeLimits(
        {name: bound for name, bound in entries.items() if bound < math.inf},
        steps * of_model,
        settings.proportional_shrink * lr,
        num_minibatches * _ROUNDING,
    )


def measure(
    sent: Vector,
    is_delta: bool,
    start: PartOfStart,
    layout: FlatLayout,
    pieces: Pieces,
    limits: ChangeLimits,
) -> Deltas:
    """The norms of a result that holds `pieces` of the model.

    Args:
        sent: the vector of the result.
        is_delta: it holds end - start, not the parameters at the end.
        start: returns a part of the parameters that the job started from.
    """
    names = [layout.name_at(target.start) for target, _ in pieces]
    sums = np.array(
        [_sums(sent[source], is_delta, start, target) for target, source in pieces]
    ).reshape(-1, 3)
    with np.errstate(invalid="ignore"):
        norms_E, starts_E = np.sqrt(sums[:, 0]), np.sqrt(sums[:, 2])
        along_E = sums[:, 1] / np.maximum(starts_E, 1e-30)
    bounds_E = np.array([limits.entries.get(name, math.inf) for name in names])
    has_limit_E = np.isfinite(bounds_E)
    slack_E = limits.shrinkage * starts_E + limits.rounding * (
        starts_E + np.where(has_limit_E, bounds_E, 0.0)
    )
    total = limits.model + float(np.sqrt(np.sum(slack_E[has_limit_E] ** 2)))
    return Deltas(norms_E, along_E, starts_E, bounds_E + slack_E, total)


def _sums(
    sent: Vector, is_delta: bool, start: PartOfStart, target: slice
) -> tuple[float, float, float]:
    """(|delta|^2, <delta, start>, |start|^2) of one entry, without a second vector in memory."""
    sums = [0.0, 0.0, 0.0]
    # damage may be as large as 1e38: squares overflow float32, and Inf is what is wanted then
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(sent), _CHUNK):
            part = sent[first : first + _CHUNK]
            before = start(slice(target.start + first, target.start + first + len(part)))
            delta = part if is_delta else part - before
            for index, (one, other) in enumerate(
                ((delta, delta), (delta, before), (before, before))
            ):
                sums[index] += float(np.dot(one, other))
    return sums[0], sums[1], sums[2]
