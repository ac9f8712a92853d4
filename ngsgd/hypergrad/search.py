"""Descent along hypergradients in a trust region, after a coarse search over two learning rates.

Costs are in ordinary runs of the proxy: a run costs 1, its reverse pass REVERSE_COST.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ngsgd.errors import DivergenceError
from ngsgd.hypergrad.hyperparameters import HyperGrad, HypergradientReport, HyperparameterPlan
from ngsgd.hypergrad.search_space import HyperSpace

# measured: docs/tuning.md
REVERSE_COST = 3.2
# Factor of the best rate of the coarse search: gradients near the edge of stability are unreliable.
_BACK_OFF = 0.5
_GROW, _SHRINK = 1.2, 0.7
# The next step must improve on the worst of this number of accepted steps.
_WINDOW = 4
# Size of the first step in logarithms: the number with the steepest slope changes by a factor of
# 1.6.
_RADIUS = 0.5
# Decay of the means of slopes and of their squares.
_MEMORY = 0.5
# Slopes below this fraction of the steepest count as small.
_FLOOR = 0.1


@dataclass(frozen=True)
class SearchTrial:
    """One run of the proxy."""

    # coarse or descent
    kind: str
    # ordinary runs so far, with this one
    cost: float
    # validation loss; inf if it diverged
    value: float
    theta: tuple[float, ...]
    # Whether the descent continued from this trial, the best at that time.
    accepted: bool
    report: HypergradientReport | None = None
    # norm of the hypergradient, if computed
    norm: float = 0.0


@dataclass
class SearchResult:
    """All trials of a search."""

    space: HyperSpace
    trials: list[SearchTrial] = field(default_factory=list)
    spent: float = 0.0

    @property
    def best(self) -> SearchTrial:
        r"""Trial with the lowest loss."""
        return min(self.trials, key=lambda trial: trial.value)

    def best_within(self, cost: float) -> float:
        """Return the lowest loss up to that cost."""
        return min((trial.value for trial in self.trials if trial.cost <= cost), default=math.inf)

    def add(self, kind: str, value: float, theta_D: Tensor, *, cost: float = 1.0) -> SearchTrial:
        """Append a trial."""
        self.spent += cost
        accepted = value < (self.best.value if self.trials else math.inf)
        self.trials.append(SearchTrial(kind, self.spent, value, tuple(theta_D.tolist()), accepted))
        return self.trials[-1]


class EvaluatedRun(Protocol):
    """Interface of a completed run; see `ngsgd.hypergrad.HypergradientRun`."""

    value: float

    def gradient(self) -> HyperGrad:
        """Return its gradients."""


Evaluate = Callable[[HyperparameterPlan], EvaluatedRun]
TrialCallback = Callable[[SearchTrial], None]
Seeder = Callable[[Callable[[Tensor], float], Tensor, Tensor, int, int], None]


def random_seeder(objective: Callable[[Tensor], float], low_2: Tensor, high_2: Tensor, num_trials: int, seed: int) -> None:
    """Sample points uniformly from the box, after its center; used if Optuna is not installed."""
    random = np.random.default_rng(seed)
    for trial in range(num_trials):
        share = torch.full_like(low_2, 0.5) if trial == 0 else torch.from_numpy(random.random(len(low_2)))
        objective(low_2 + share * (high_2 - low_2))


def tune_hyperparameters(evaluate: Evaluate, space: HyperSpace, *, budget: float,
                         seed_share: float = 0.25, seeder: Seeder = random_seeder,
         seed: int = 0, watch: TrialCallback | None = None) -> SearchResult:
    """Search `space` with a budget of ordinary runs.

    The first part of the budget goes to `seeder`, over initial and final learning rate only. From
    half of its best rates on, all numbers change together along their hypergradient. The step size
    grows if the loss falls, and shrinks otherwise: only measured losses decide.

    Args:
        evaluate: runs a plan; returns loss and gradients.
        space: the tuned hyperparameters.
        budget: in ordinary runs.
        seed_share: fraction of the budget for the coarse search. Default 0.25.
        seeder: coarse search. Default: random.
        seed: of the coarse search.
        watch: called with every trial.

    Returns:
        All trials; `best` is the result.
    """
    search = SearchResult(space)
    watch = watch or (lambda trial: None)
    theta_D = space.center()
    num_coarse = int(seed_share * budget)
    if num_coarse and "schedule" in space.slices:
        theta_D = _coarse(search, evaluate, theta_D, num_coarse, seeder, seed, watch)
    _descend(search, evaluate, theta_D, budget, watch)
    return search


def _coarse(search: SearchResult, evaluate: Evaluate, theta_D: Tensor, num_trials: int,
            seeder: Seeder, seed: int,
            watch: TrialCallback) -> Tensor:
    """Return the best exponential schedule, at half its rates."""
    space = search.space
    reach = math.log(space.rates)
    middle_2 = torch.tensor([math.log(space.settings.lr_initial), math.log(space.settings.lr_final)], dtype=torch.float64)

    def objective(logs_2: Tensor) -> float:
        point_D = space.with_rates(theta_D, *logs_2.exp().tolist())
        watch(trial := search.add("coarse", _value(evaluate, space, point_D)[0], point_D))
        return trial.value
    seeder(objective, middle_2 - reach, middle_2 + reach, num_trials, seed)
    return space.clamp(space.scaled(torch.tensor(search.best.theta, dtype=torch.float64), _BACK_OFF))


def _descend(search: SearchResult, evaluate: Evaluate, theta_D: Tensor, budget: float,
             watch: TrialCallback) -> None:
    """Trust-region descent.

    Reverse only runs that improve; where it ends, restart from lower rates.
    """
    radius = _RADIUS
    while search.spent + 1.0 <= budget:
        theta_D = _descend_once(search, evaluate, theta_D, budget, watch, radius)
        if "schedule" not in search.space.slices:
            return
        theta_D, radius = search.space.scaled(torch.tensor(search.best.theta, dtype=torch.float64), _BACK_OFF ** 0.5), radius / 2.0


def _descend_once(search: SearchResult, evaluate: Evaluate, theta_D: Tensor, budget: float,
                  watch: TrialCallback, radius: float) -> Tensor:
    """Descend until the radius is small.

    Accept a step that improves on the worst of the last accepted.

    Losses of short runs are noisy and their minimum is optimistically biased. Requiring a new
    minimum at every step would stop there.
    """
    space, smallest = search.space, radius / 32.0
    value, evaluated = _value(evaluate, space, theta_D)
    watch(search.add("descent", value, theta_D))
    stood = [value]
    mean_D, squares_D = torch.zeros_like(theta_D), torch.zeros_like(theta_D)
    while evaluated is not None and search.spent + REVERSE_COST + 1.0 <= budget and radius > smallest:
        found = evaluated.gradient()
        search.spent += REVERSE_COST
        leaf_D = theta_D.clone().requires_grad_()
        slope_D = torch.nan_to_num(found.by(space.build(leaf_D), leaf_D), nan=0.0, posinf=0.0, neginf=0.0)
        # Gradient norms diverge near the edge of stability, so only the direction is used.
        unit_D = slope_D / slope_D.norm().clamp(min=1e-30)
        mean_D = _MEMORY * mean_D + (1.0 - _MEMORY) * unit_D
        squares_D = _MEMORY * squares_D + (1.0 - _MEMORY) * unit_D.square()
        direction_D = _direction(space, mean_D, squares_D, found.report)
        _noted(search, found, slope_D)
        evaluated = None
        while evaluated is None and search.spent + 1.0 <= budget and radius > smallest:
            point_D = space.clamp(theta_D + radius * direction_D)
            lower, at_point = _value(evaluate, space, point_D)
            watch(search.add("descent", lower, point_D))
            radius *= _GROW if lower < stood[-1] else _SHRINK
            if lower < max(stood[-_WINDOW:]):
                stood.append(lower)
                theta_D, evaluated = point_D, at_point
    return theta_D


def _value(evaluate: Evaluate, space: HyperSpace, theta_D: Tensor) -> tuple[float,
                                                                            EvaluatedRun | None]:
    """Return (loss, the run); the loss is infinite if the run diverges."""
    try:
        evaluated = evaluate(space.build(theta_D))
    except DivergenceError:
        return math.inf, None
    return (evaluated.value, evaluated) if math.isfinite(evaluated.value) else (math.inf, None)


def _direction(space: HyperSpace, mean_D: Tensor, squares_D: Tensor,
               report: HypergradientReport) -> Tensor:
    """Return the descent direction: mean slopes over root mean squares; the largest entry is 1."""
    if not report.trusted and "schedule" in space.slices:
        # Chaos: signs of slopes are unreliable, but lower rates remove the cause.
        direction_D = torch.zeros_like(mean_D)
        direction_D[space.slices["schedule"]] = -1.0
        return direction_D
    # Slopes of l2 are often a hundredth of those of the rates, but still useful.
    scaled_D = -mean_D / (squares_D.sqrt() + _FLOOR * squares_D.sqrt().max() + 1e-30)
    return scaled_D / scaled_D.abs().max().clamp(min=1e-30)


def _noted(search: SearchResult, found: HyperGrad, slope_D: Tensor) -> None:
    """Attach the report to the last accepted trial, to which it belongs."""
    index = max(i for i, trial in enumerate(search.trials) if trial.kind == "descent" and trial.value == found.value)
    old = search.trials[index]
    search.trials[index] = SearchTrial(old.kind, old.cost, old.value, old.theta, old.accepted,
                                       found.report, float(slope_D.norm()))
