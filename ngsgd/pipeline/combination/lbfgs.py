"""L-BFGS that climbs a smooth function within a budget of evaluations.

Algorithm 7.4 and equation (7.20) of Nocedal and Wright, Numerical Optimization, 2nd edition, with the settings of Kaldi's
OptimizeLbfgs (matrix/optimization.h): c1 = 1e-4, c2 = 0.9, and a first step that is expected to gain a given amount.  Steps
satisfy the weak Wolfe conditions; they are found by doubling, then halving the interval between too short and too long.
Letters: x a point, g the gradient there, s a step, y what the gradient lost over it, both of D dimensions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Function = Callable[[Array], tuple[float, Array]]  # x -> (value, gradient)

_C1, _C2 = 1e-4, 0.9
# of the value: a gain below it is lost in rounding
_PRECISION = 1e-10


class Point(NamedTuple):
    """Where the function has been evaluated."""

    x_D: Array
    # minus infinity where value or gradient is not finite
    value: float
    g_D: Array


def maximise(function: Function, start_D: Array, *, max_evaluations: int = 40, memory: int = 10,
             first_improvement: float = 0.01) -> Point:
    """The best point found with at most `max_evaluations` evaluations, that of the start included: never below the start.

    The first step goes along the gradient, as far as would gain `first_improvement` if the function were linear.
    """
    budget = _Budget(function, max_evaluations)
    here = budget.evaluate(start_D)
    pairs: deque[tuple[Array, Array]] = deque(maxlen=memory)
    slope = float(here.g_D @ here.g_D)
    scale = first_improvement / slope if slope > 0.0 else 0.0
    while math.isfinite(here.value):
        there = _climb(budget, here, direction(here.g_D, pairs, scale))
        # the budget is spent, or all that is left to gain is lost in rounding
        if there is None:
            break
        s_D, y_D = there.x_D - here.x_D, here.g_D - there.g_D
        # s^T y > 0 by the second Wolfe condition
        pairs.append((s_D, y_D))
        scale = float(s_D @ y_D / (y_D @ y_D))  # (7.20)
        here = there
    return budget.best


def direction(g_D: Array, pairs: Sequence[tuple[Array, Array]], scale: float) -> Array:
    """H g, H the inverse of minus the Hessian as (s, y) `pairs`, oldest first, tell it (algorithm 7.4); H_0 = `scale` I."""
    q_D, alphas = g_D.copy(), []
    for s_D, y_D in reversed(pairs):
        alphas.append(s_D @ q_D / (s_D @ y_D))
        q_D -= alphas[-1] * y_D
    r_D = scale * q_D
    for (s_D, y_D), alpha in zip(pairs, reversed(alphas), strict=True):
        r_D += (alpha - y_D @ r_D / (s_D @ y_D)) * s_D
    return r_D


def _climb(budget: _Budget, here: Point, direction_D: Array) -> Point | None:
    """A point along `direction_D` that satisfies both Wolfe conditions, if one is found."""
    slope = float(here.g_D @ direction_D)
    step, short, long = 1.0, 0.0, math.inf
    while budget.left and step * slope > _PRECISION * abs(here.value):
        there = budget.evaluate(here.x_D + step * direction_D)
        if there.value < here.value + _C1 * step * slope:
            long = step
        elif there.g_D @ direction_D > _C2 * slope:
            short = step
        else:
            return there
        step = 2.0 * step if long == math.inf else 0.5 * (short + long)
    return None


class _Budget:
    """Counts evaluations and remembers the best."""

    def __init__(self, function: Function, max_evaluations: int) -> None:
        self._function = function
        self.left = max_evaluations
        self._best: Point | None = None

    def evaluate(self, x_D: Array) -> Point:
        self.left -= 1
        value, g_D = self._function(x_D)
        is_finite = math.isfinite(value) and bool(np.isfinite(g_D).all())
        point = Point(x_D, value if is_finite else -math.inf, g_D)
        if self._best is None or point.value > self._best.value:
            self._best = point
        return point

    @property
    def best(self) -> Point:
        assert self._best is not None
        return self._best
