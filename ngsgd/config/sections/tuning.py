"""Options of hyperparameter tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngsgd.config.option import option


@dataclass(frozen=True)
class ProxyConfig:
    """The short training run on which hyperparameters are tuned."""

    steps: int = option(400, "length of each job of the proxy run", unit="minibatches", low=2, high=1000000)
    outer_iters: int = option(4, "number of averaging steps of the proxy run; must divide steps", low=1, high=10000)


@dataclass(frozen=True)
class TuneConfig:
    """Tuning of hyperparameters by gradient (`ngsgd tune`)."""

    space: tuple[str, ...] = option(
        ("schedule", "layer_lr", "l2", "momentum"),
        "hyperparameters to tune: schedule, layer_lr, l2, momentum, max_change, init_scale")
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    budget: float = option(60.0, "maximum cost of the search; a hypergradient costs 4.2 proxy runs", unit="runs", above=0.0)
    coarse_fraction: float = option(0.25, "fraction of the budget for the coarse search of initial "
                                    "and final learning rate", low=0.0, high=1.0)
