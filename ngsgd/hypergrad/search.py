"""Descent along hypergradients in a trust region, after a coarse search over two learning rates.

Costs are in ordinary runs of the proxy: a run costs 1, its reverse pass REVERSE_COST.
Letters: D tuned numbers (theta), K knots of the learning-rate schedule, T steps, G layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ngsgd.arguments import check_fields
from ngsgd.errors import ConfigError, DivergenceError
from ngsgd.hypergrad.gradient import HypergradientRun
from ngsgd.hypergrad.hyperparameters import HypergradientReport, HyperparameterPlan, full

# measured: docs/tuning.md
REVERSE_COST = 3.2
# Factor of the best rate of the coarse search: gradients near the edge of stability are unreliable.
_BACK_OFF = 0.5
_GROW, _SHRINK = 1.2, 0.7
# The next step must improve on the worst of this number of accepted steps.
_WINDOW = 4
# Size of the first step in logarithms: the number of the steepest slope changes by a factor of 1.6.
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

    def add(self, kind: str, value: float, theta_D: Tensor, *, cost: float = 1.0) -> SearchTrial:
        """Append a trial."""
        self.spent += cost
        accepted = value < (self.best.value if self.trials else math.inf)
        self.trials.append(SearchTrial(kind, self.spent, value, tuple(theta_D.tolist()), accepted))
        return self.trials[-1]


Evaluate = Callable[[HyperparameterPlan], HypergradientRun]
TrialCallback = Callable[[SearchTrial], None]
Seeder = Callable[[Callable[[Tensor], float], Tensor, Tensor, int, int], None]


def random_seeder(objective: Callable[[Tensor], float], low_2: Tensor, high_2: Tensor, num_trials: int, seed: int) -> None:
    """Sample points uniformly from the box, after its center; used if Optuna is not installed."""
    random = np.random.default_rng(seed)
    for trial in range(num_trials):
        share = torch.full_like(low_2, 0.5) if trial == 0 else torch.from_numpy(random.random(len(low_2)))
        objective(low_2 + share * (high_2 - low_2))


def tune_hyperparameters(evaluate: Evaluate, space: HyperSpace, *, budget: float,
                         seed_share: float = 0.25, seeder: Seeder = random_seeder, seed: int = 0,
                         watch: TrialCallback | None = None) -> SearchResult:
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
    radius = _RADIUS
    while search.spent + 1.0 <= budget:
        theta_D = _descend(search, evaluate, theta_D, budget, watch, radius)
        if "schedule" not in space.slices:
            break
        # Where the descent ends, restart from lower rates.
        theta_D = space.scaled(torch.tensor(search.best.theta, dtype=torch.float64), _BACK_OFF ** 0.5)
        radius /= 2.0
    return search


def _coarse(search: SearchResult, evaluate: Evaluate, theta_D: Tensor, num_trials: int,
            seeder: Seeder, seed: int, watch: TrialCallback) -> Tensor:
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
             watch: TrialCallback, radius: float) -> Tensor:
    """Descend until the radius is small; reverse only runs that improve."""
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
        # The last accepted trial, to which the report belongs.
        index = max(i for i, trial in enumerate(search.trials) if trial.kind == "descent" and trial.value == found.value)
        search.trials[index] = replace(search.trials[index], report=found.report, norm=float(slope_D.norm()))
        evaluated = None
        while evaluated is None and search.spent + 1.0 <= budget and radius > smallest:
            point_D = space.clamp(theta_D + radius * direction_D)
            lower, at_point = _value(evaluate, space, point_D)
            watch(search.add("descent", lower, point_D))
            radius *= _GROW if lower < stood[-1] else _SHRINK
            # Losses of short runs are noisy, so a descent that requires minima would stop early.
            if lower < max(stood[-_WINDOW:]):
                stood.append(lower)
                theta_D, evaluated = point_D, at_point
    return theta_D


def _value(evaluate: Evaluate, space: HyperSpace, theta_D: Tensor) -> tuple[float, HypergradientRun | None]:
    """Return (loss, the run); the loss is infinite if the run diverges."""
    try:
        evaluated = evaluate(space.build(theta_D))
    except DivergenceError:
        return math.inf, None
    return (evaluated.value, evaluated) if math.isfinite(evaluated.value) else (math.inf, None)


def _direction(space: HyperSpace, mean_D: Tensor, squares_D: Tensor, report: HypergradientReport) -> Tensor:
    """Return the descent direction: mean slopes over root mean squares; the largest entry is 1."""
    if not report.trusted and "schedule" in space.slices:
        # Chaos: signs of slopes are unreliable, but lower rates remove the cause.
        direction_D = torch.zeros_like(mean_D)
        direction_D[space.slices["schedule"]] = -1.0
        return direction_D
    # Slopes of l2 are often a hundredth of those of the rates, but still useful.
    scaled_D = -mean_D / (squares_D.sqrt() + _FLOOR * squares_D.sqrt().max() + 1e-30)
    return scaled_D / scaled_D.abs().max().clamp(min=1e-30)


PARTS = ("schedule", "layer_lr", "l2", "momentum", "max_change", "init_scale")
# Initial value of l2 if it is tuned from 0, which has no logarithm.
_TINY_L2 = 1e-6


@dataclass(frozen=True)
class BaseHyperparameters:
    """Hyperparameters before tuning; a space changes some of them.

    Example:
        >>> BaseHyperparameters(lr_initial=0.1, lr_final=0.01).lr_final
        0.01
    """

    lr_initial: float            # of a job
    lr_final: float
    momentum: float = 0.9
    l2: float = 0.0
    max_change: float = 0.0      # 0 = none
    max_param_change: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class HyperSpace:
    """A box around `settings` in logarithms (of 1 - momentum for momentum).

    Args:
        settings: hyperparameters before tuning.
        parts: any of schedule, layer_lr, l2, momentum, max_change, init_scale. All but schedule and
            momentum have one number per layer.
        knots: number of knots of the schedule, at equal distances with geometric interpolation. 2:
            initial and final rate, exponential decay.
        rates: maximum factor between learning rates and those of `settings`.
        others: the same for other hyperparameters.
    """

    settings: BaseHyperparameters
    layers: tuple[str, ...]
    num_steps: int
    num_jobs: int = 1
    num_outer_iters: int = 1
    parts: tuple[str, ...] = ("schedule", "layer_lr", "l2", "momentum")
    knots: int = 10
    rates: float = 30.0
    others: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self)
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ConfigError(f"tune.space has {', '.join(unknown)}; choose from {', '.join(PARTS)}.")
        if not self.parts or self.knots < 2:
            raise ConfigError(f"tune.space is {list(self.parts)} with {self.knots} knots; select a "
                              "part to tune, with at least 2 knots.")
        if "max_change" in self.parts and not self.settings.max_change:
            raise ConfigError("tune.space has max_change, but optimizer.max_change is 0, no limit; set an initial limit.")

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Position of each part in theta."""
        sizes = {"schedule": self.knots, "momentum": 1}
        found, first = {}, 0
        for part in (part for part in PARTS if part in self.parts):
            found[part] = slice(first, first := first + sizes.get(part, len(self.layers)))
        return found

    @property
    def size(self) -> int:
        r"""D"""
        return sum(part.stop - part.start for part in self.slices.values())

    def names(self) -> list[str]:
        """Names of the D numbers."""
        def of(part: str) -> list[str]:
            if part == "schedule":
                return [f"lr at {index / (self.knots - 1):.2f}" for index in range(self.knots)]
            return ["momentum"] if part == "momentum" else [f"{part} of {layer}" for layer in self.layers]
        return [name for part in self.slices for name in of(part)]

    def center(self) -> Tensor:
        """Theta of `settings`."""
        s = self.settings
        starts = {"schedule": self._exponential(s.lr_initial, s.lr_final), "momentum": [math.log(1.0 - s.momentum)],
                  "layer_lr": [0.0] * len(self.layers), "l2": [math.log(s.l2 or _TINY_L2)] * len(self.layers),
                  "max_change": [math.log(s.max_change or 1.0)] * len(self.layers), "init_scale": [0.0] * len(self.layers)}
        return torch.tensor([value for part in self.slices for value in starts[part]], dtype=torch.float64)

    def reach(self) -> Tensor:
        """Maximum distance of each number from the center, D."""
        reaches = {"schedule": self.rates, "layer_lr": self.others, "l2": self.others ** 2, "momentum": self.others,
                   "max_change": self.others, "init_scale": self.others ** 0.5}
        return torch.tensor([math.log(reaches[part]) for part, where in self.slices.items()
                             for _ in range(where.stop - where.start)], dtype=torch.float64)

    def clamp(self, theta_D: Tensor) -> Tensor:
        """Return the nearest point of the box."""
        center_D, reach_D = self.center(), self.reach()
        clamped_D = torch.minimum(torch.maximum(theta_D, center_D - reach_D), center_D + reach_D)
        if "momentum" in self.slices:
            clamped_D[self.slices["momentum"]] = clamped_D[self.slices["momentum"]].clamp(math.log(0.002), math.log(0.9))
        return clamped_D

    def with_rates(self, theta_D: Tensor, lr_initial: float, lr_final: float) -> Tensor:
        """Return theta with the exponential schedule between two rates."""
        changed_D = theta_D.clone()
        changed_D[self.slices["schedule"]] = torch.tensor(self._exponential(lr_initial, lr_final), dtype=torch.float64)
        return changed_D

    def scaled(self, theta_D: Tensor, factor: float) -> Tensor:
        """Return theta with all learning rates multiplied."""
        changed_D = theta_D.clone()
        changed_D[self.slices["schedule"]] += math.log(factor)
        return changed_D

    def build(self, theta_D: Tensor) -> HyperparameterPlan:
        """Return the plan, differentiable with respect to theta."""
        layers, s = len(self.layers), self.settings
        values = {part: theta_D[where] for part, where in self.slices.items()}
        exponential_K = torch.tensor(self._exponential(s.lr_initial, s.lr_final), dtype=torch.float64)
        # piecewise linear in logarithms through the knots
        lr_T = (interpolation(self.num_steps, self.knots) @ values.get("schedule", exponential_K)).exp()
        factor_G = values["layer_lr"].exp() if "layer_lr" in values else full(1.0, layers)
        momentum = 1.0 - values["momentum"].exp() if "momentum" in values else full(s.momentum, 1)
        return HyperparameterPlan(
            lr_T[:, None] * factor_G, momentum.expand(self.num_steps, layers),
            values["l2"].exp() if "l2" in values else full(s.l2, layers),
            values["init_scale"].exp() if "init_scale" in values else full(1.0, layers),
            values["max_change"].exp() if "max_change" in values else full(s.max_change, layers),
            full(s.max_param_change), full(1.0, self.num_outer_iters, self.num_jobs))

    def values(self, theta_D: Tensor) -> dict[str, list[float]]:
        """Return the tuned values by part: rates at the knots, factors, l2, momentum."""
        found = {part: theta_D[where].exp().tolist() for part, where in self.slices.items()}
        if "momentum" in found:
            found["momentum"] = [1.0 - found["momentum"][0]]
        return found

    def _exponential(self, lr_initial: float, lr_final: float) -> list[float]:
        first, last = math.log(lr_initial), math.log(lr_final)
        return [first + (last - first) * index / (self.knots - 1) for index in range(self.knots)]


def interpolation(num_steps: int, num_knots: int) -> Tensor:
    """Return the matrix (steps x knots) of linear interpolation between equidistant knots."""
    at_T = torch.arange(num_steps, dtype=torch.float64) * ((num_knots - 1) / max(1, num_steps - 1))
    distance_TK = (at_T[:, None] - torch.arange(num_knots, dtype=torch.float64)).abs()
    return (1.0 - distance_TK).clamp(min=0.0)
