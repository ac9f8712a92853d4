"""Result of a search: its figures, and the settings of the best run of the proxy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError, DataError
from ngsgd.pipeline.tuning.proxy import Proxy

# these import torch, and --help must answer immediately
if TYPE_CHECKING:
    from ngsgd.hypergrad import HyperSpace, SearchResult
    from ngsgd.hypergrad.search import TrialCallback


@dataclass(frozen=True)
class Tuned:
    """The best run of a search.

    Attributes:
        valid: its validation loss, minus objf per frame.
        held_out: its loss on frames that the search did not use.
        theta: logarithms of its hyperparameters, in the order of `names`.
        names: one name per number of `theta`.
        values: its hyperparameters by part of the space, such as `schedule`.
        cost: training runs of the proxy that the search used.
        preconditioner: treatment of the preconditioner in the hypergradient.
        exact: whether all hypergradients were exact.
        proxy: steps, jobs, outer iterations and frames of the proxy.
    """

    valid: float
    held_out: float
    theta: list[float]
    names: list[str]
    values: dict[str, list[float]]
    cost: float
    preconditioner: str
    exact: bool
    proxy: dict[str, int]


def search(proxy: Proxy, watch: TrialCallback) -> SearchResult:
    """Tune with the budget and the fraction of coarse trials of the configuration."""
    from ngsgd.hypergrad import tune_hyperparameters
    from ngsgd.pipeline.tuning.coarse_search import seeder

    tune = proxy.config.tune
    return tune_hyperparameters(
        proxy.evaluate, proxy.space, budget=tune.budget, seed_share=tune.coarse_fraction,
        seeder=seeder()[1], seed=proxy.config.seed, watch=watch)


def try_multiples(proxy: Proxy, theta: Sequence[float]) -> SearchResult:
    """Run a longer proxy with multiples of the learned rates.

    Raises:
        ConfigError: `theta` belongs to another space.
    """
    import torch

    from ngsgd.hypergrad.search import transfer

    if len(theta) != proxy.space.size:
        raise ConfigError(f"{len(theta)} numbers were tuned, but tune.space has "
                          f"{proxy.space.size}; use the settings of the ngsgd tune run again.")
    theta_D = torch.tensor(theta, dtype=torch.float64)
    return transfer(proxy.evaluate, proxy.space, theta_D)


def tuned(proxy: Proxy, found: SearchResult) -> Tuned:
    """Return the best run of a search, with its loss on held-out frames.

    Raises:
        DataError: all runs diverged.
    """
    import torch

    from ngsgd.hypergrad import final_value

    best, space = found.best, proxy.space
    if not math.isfinite(best.value):
        raise DataError("all runs of the proxy diverged; lower schedule.lr_initial, or enable "
                        "update-norm clipping.")
    theta_D = torch.tensor(best.theta, dtype=torch.float64)
    values = space.values(space.clamp(theta_D) if best.kind != "transfer" else theta_D)
    held_out = final_value(proxy.task.held_out, space.build(theta_D), gradients=proxy.gradients())
    reports = [trial.report for trial in found.trials if trial.report is not None]
    return Tuned(
        best.value, held_out, list(best.theta), space.names(), values, found.spent,
        preconditioner=reports[-1].preconditioner if reports else "none",
        exact=all(report.exact for report in reports),
        proxy={"steps": space.num_steps, "jobs": space.num_jobs,
               "outer_iters": space.num_outer_iters, "frames": proxy.task.num_frames})


def rates_before(space: HyperSpace) -> list[float]:
    """Return the learning rate of a job at each knot of the schedule, before tuning."""
    s = space.settings
    return [float(s.lr_initial * (s.lr_final / s.lr_initial) ** (knot / (space.knots - 1)))
            for knot in range(space.knots)]


def settings_of(config: RunConfig, space: HyperSpace, values: Mapping[str, Sequence[float]],
                num_jobs: int) -> dict[str, Any]:
    """Return nested settings that reproduce the training of the proxy.

    Learning rates of the proxy are effective ones, and its l2 is per frame.
    """
    found: dict[str, Any] = {"schedule": {}, "optimizer": {"kind": config.optimizer.kind}}
    if "schedule" in values:
        rates = [rate / num_jobs for rate in values["schedule"]]
        middle = math.exp(sum(map(math.log, rates)) / len(rates))
        found["schedule"] = {"lr_initial": middle, "lr_final": middle,
                             "lr_factors": [rate / middle for rate in rates]}
    if "momentum" in values:
        found["optimizer"]["momentum"] = min(values["momentum"][0], 0.999)
    # half of l2 |w|^2 on the loss summed over a minibatch, versus weight_decay |w|^2 per frame,
    # divided among the jobs
    per_frame = num_jobs / (2.0 * config.schedule.minibatch_size)
    keys = {"layer_lr": ("lr_factor", 1.0), "l2": ("weight_decay", per_frame),
            "max_change": ("max_change", 1.0)}
    options = {layer: {key: values[part][index] * unit
                       for part, (key, unit) in keys.items() if part in values}
               for index, layer in enumerate(space.layers)}
    if any(options.values()):
        found["optimizer"]["layer_options"] = options
    if "init_scale" in values:
        found["model"] = {"init_scales": dict(zip(space.layers, values["init_scale"], strict=True))}
    return {section: content for section, content in found.items() if content}
