"""Options of hyperparameter tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class ProxyConfig:
    """The short training run on which hyperparameters are tuned."""

    steps: int = option(400, "minibatches of each job", low=2, high=1000000)
    outer_iters: int = option(4, "number of averaging steps; must divide steps", low=1, high=10000)


@dataclass(frozen=True)
class TuneConfig:
    """Tuning of hyperparameters by gradient (`ngsgd tune`)."""

    space: tuple[str, ...] = option(
        ("schedule", "layer_lr", "l2", "momentum"),
        "hyperparameters to tune; max_change and init_scale are also possible")
    knots: int = option(6, "knots of the learning-rate schedule; 2: exponential", low=2, high=100)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    budget: float = option(60.0, "cost limit in runs of the proxy; a hypergradient costs 4.2 runs",
                           unit="runs", above=0.0)
    coarse_fraction: float = option(
        0.25, "fraction of the budget for the coarse search of initial and final learning rate",
        low=0.0, high=1.0)
    num_jobs: int = option(0, "jobs that are averaged; 0: schedule.num_jobs_final", low=0,
                           high=1000)
    engine: Literal["auto", "store", "reversible", "checkpoint"] = option(
        "auto", "source of the trajectory in the reverse pass; auto: store if memory_gb suffices")
    memory_gb: float = option(1.0, "memory limit of a stored trajectory", unit="GB", above=0.0,
                              used="engine=auto")
    max_lr_ratio: float = option(
        30.0, "largest factor between a tuned learning rate and the recipe's", above=1.0)
    multipliers: tuple[float, ...] = option(
        (1.0, 0.5, 0.25), "factors on all learning rates that ngsgd tune transfer tries")
    transfer_steps: int = option(
        0, "minibatches of each job of ngsgd tune transfer; 0: four times the proxy's", low=0)
