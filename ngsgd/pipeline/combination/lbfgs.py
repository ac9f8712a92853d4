"""L-BFGS maximization of a smooth function within a budget of evaluations.

Algorithm 7.4 and equation (7.20) of Nocedal and Wright, Numerical Optimization, 2nd edition, with
the settings of OptimizeLbfgs in Kaldi (matrix/optimization.h): c1 = 1e-4, c2 = 0.9, and a first
step with a given expected gain. Steps satisfy the weak Wolfe conditions. They are found by
doubling, then bisection of the interval between too short and too long.

Letters: x a point, g the gradient there, s a step, y the decrease of the gradient over it, both of
D dimensions.
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
# relative to the value: a smaller gain is lost in rounding
_PRECISION = 1e-10


class Point(NamedTuple):
    """An evaluation of the function."""

    x_D: Array
    # minus infinity if value or gradient is not finite
    value: float
    g_D: Array


def maximise(function: Function, start_D: Array, *, max_evaluations: int = 40, memory: int = 10,
             first_improvement: float = 0.01) -> Point:
    """Return the best point of at most `max_evaluations` evaluations, including the start.

    The first step is along the gradient. Its length would gain `first_improvement` if the function
    were linear.
    """
    budget = _Budget(function, max_evaluations)
    here = budget.evaluate(start_D)
    pairs: deque[tuple[Array, Array]] = deque(maxlen=memory)
    slope = float(here.g_D @ here.g_D)
    scale = first_improvement / slope if slope > 0.0 else 0.0
    while math.isfinite(here.value):
        there = _climb(budget, here, direction(here.g_D, pairs, scale))
        # the budget is used up, or the remaining gain is lost in rounding
        if there is None:
            break
        s_D, y_D = there.x_D - here.x_D, here.g_D - there.g_D
        # s^T y > 0 by the second Wolfe condition
        pairs.append((s_D, y_D))
        scale = float(s_D @ y_D / (y_D @ y_D))  # (7.20)
        here = there
    return budget.best


def direction(g_D: Array, pairs: Sequence[tuple[Array, Array]], scale: float) -> Array:
    """H g, with the inverse H of minus the Hessian estimated from (s, y) `pairs`, oldest first.

    This is algorithm 7.4 with H_0 = `scale` I.
    """
    q_D, alphas = g_D.copy(), []
    for s_D, y_D in reversed(pairs):
        alphas.append(s_D @ q_D / (s_D @ y_D))
        q_D -= alphas[-1] * y_D
    r_D = scale * q_D
    for (s_D, y_D), alpha in zip(pairs, reversed(alphas), strict=True):
        r_D += (alpha - y_D @ r_D / (s_D @ y_D)) * s_D
    return r_D


def _climb(budget: _Budget, here: Point, direction_D: Array) -> Point | None:
    """Find a point along `direction_D` that satisfies both Wolfe conditions."""
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
    """Counts evaluations and keeps the best."""

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
