"""Norms of the parameter delta of a job per entry, and the largest norms that clipping allows.

The worker measures them from the vector that it sends, so that a result can be checked wherever its
vector is stored (`ngsgd.training.validation.plausibility`).

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
from ngsgd.ops.compression import Codec, Encoded, decode, encode
from ngsgd.optim import Optimizer
from ngsgd.training.parameter_vector import FlatLayout, Pieces, Vector

# elements; three float32 chunks fit into the cache of a core
_CHUNK = 1 << 16
# rounding error of one step, relative to the parameters: half an ulp, doubled
_ROUNDING = 2.0**-23
# relative error of the norms that the optimizer computes in float32
_NORM_ERROR = 1e-3

PartOfStart = Callable[[slice], Vector]


class ChangeLimits(NamedTuple):
    """Largest delta norms that update-norm clipping allows; Inf: no limit is known."""

    # entry name -> limit; entries without a limit are missing
    entries: Mapping[str, float]
    # limit of all entries in `entries` together
    model: float
    # fraction of the parameters by which float32 rounding may increase a delta
    rounding: float


NO_LIMITS = ChangeLimits({}, math.inf, 0.0)


@dataclass(frozen=True)
class Deltas:
    """Norms of one result; all L2, float64."""

    norms_E: npt.NDArray[np.float64]  # of end - start
    # component of end - start in the direction of the start
    along_E: npt.NDArray[np.float64]
    starts_E: npt.NDArray[np.float64]  # of the initial parameters
    # largest possible norm; Inf: not known
    limits_E: npt.NDArray[np.float64]
    # limit for all limited entries together
    limit: float


def change_limits(model: nn.Module, optimizer: Optimizer, settings: OptimizerConfig, num_minibatches: int) -> ChangeLimits:
    """Bound the delta of a job of `num_minibatches` minibatches by update-norm clipping.

    Each step changes a component by at most max_change and the complete model by at most
    max_param_change, in L2 norm. Momentum and weight decay are part of the change that is clipped
    (`ngsgd.ops.max_change`). By the triangle inequality a job of M minibatches changes a component
    by at most M max_change, and any set of components by at most M max_param_change. Backstitch
    makes two steps per minibatch; the limits grow by alpha and 1 + alpha: 1 + 2 alpha in total.

    Entries without a bound:

    - buffers such as the statistics of batch normalization
    - matrices under the orthonormal constraint, which is applied after the step
    - parameters that the optimizer does not hold
    - the second name of a shared parameter
    """
    steps = num_minibatches * (1.0 + 2.0 * settings.backstitch_scale) * (1.0 + _NORM_ERROR)
    of_model = optimizer.max_param_change or math.inf
    bounds = {id(p): steps * min(group["max_change"] or math.inf, of_model) for group in optimizer.param_groups
              for p in group["params"] if not (group["orthonormal_constraint"] and p.ndim > 1)}
    entries = {name: bounds[id(p)] for name, p in model.named_parameters() if id(p) in bounds}
    return ChangeLimits({name: bound for name, bound in entries.items() if bound < math.inf}, steps * of_model,
                        num_minibatches * _ROUNDING)


def measure(sent: Vector, is_delta: bool, start: PartOfStart, layout: FlatLayout, pieces: Pieces, limits: ChangeLimits) -> Deltas:
    """Compute the norms of a result: end - start of `pieces` if `is_delta`, else the end."""
    names = [layout.name_at(target.start) for target, _ in pieces]
    sums = np.array([_sums(sent[source], is_delta, start, target) for target, source in pieces]).reshape(-1, 3)
    with np.errstate(invalid="ignore"):
        norms_E, starts_E = np.sqrt(sums[:, 0]), np.sqrt(sums[:, 2])
        along_E = sums[:, 1] / np.maximum(starts_E, 1e-30)
    bounds_E = np.array([limits.entries.get(name, math.inf) for name in names])
    has_limit_E = np.isfinite(bounds_E)
    slack_E = limits.rounding * (starts_E + np.where(has_limit_E, bounds_E, 0.0))
    total = limits.model + float(np.sqrt(np.sum(slack_E[has_limit_E] ** 2)))
    return Deltas(norms_E, along_E, starts_E, bounds_E + slack_E, total)


def _sums(sent: Vector, is_delta: bool, start: PartOfStart, target: slice) -> tuple[float, float, float]:
    """(|delta|^2, <delta, start>, |start|^2) of one entry, without a second vector in memory."""
    sums = [0.0, 0.0, 0.0]
    # damaged values may be as large as 1e38; their squares overflow to Inf, as intended
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(sent), _CHUNK):
            part = sent[first : first + _CHUNK]
            before = start(slice(target.start + first, target.start + first + len(part)))
            delta = part if is_delta else part - before
            for index, (one, other) in enumerate(((delta, delta), (delta, before), (before, before))):
                sums[index] += float(np.dot(one, other))
    return sums[0], sums[1], sums[2]


# (first element, values) of parts of a vector
Exact = tuple[tuple[int, Vector], ...]


def error_of(encoded: Vector, codec: Codec) -> Vector:
    """Return the part of a vector that its code does not contain."""
    return np.subtract(encoded, decode(encode(encoded, codec)))


def compress(move: Vector, before: Vector | None, codec: Codec, layout: FlatLayout, out: Vector) -> tuple[Encoded, Exact]:
    """Replace a finite delta by what its receiver decodes; return its code and exact elements.

    Statistics of normalization layers are sent exactly: a variance with an error may be negative.
    `out` receives the vector that is encoded: the delta, and the error of `before`, which the
    previous job of the slot encoded.
    """
    np.copyto(out, move)
    if before is not None:
        np.add(out, error_of(before, codec), out=out)
    parts = [part for pair in layout.mean_and_variance() for part in pair]
    exact = tuple((part.start, move[part].copy()) for part in parts)
    for part in parts:
        out[part] = 0.0
    encoded = encode(out, codec)
    np.copyto(move, decompress(encoded, exact))
    return encoded, exact


def decompress(encoded: Encoded, exact: Exact) -> Vector:
    """Return a delta; ValueError if its code is damaged, as far as that can be seen."""
    move = decode(encoded)
    for first, values in exact:
        if not 0 <= first <= len(move) - len(values):
            raise ValueError(f"elements {first} to {first + len(values)} are outside of a delta of {len(move)}")
        move[first:first + len(values)] = values
    return move
