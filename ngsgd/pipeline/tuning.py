"""Tuning by hypergradients: the short run of the configuration, its search and its result."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError, DataError

# these import torch, and --help must answer immediately
if TYPE_CHECKING:
    from torch import Tensor

    from ngsgd.hypergrad import HypergradientRun, HyperparameterPlan, HyperSpace, SearchResult
    from ngsgd.hypergrad.egs_task import EgsTask
    from ngsgd.hypergrad.search import Seeder, TrialCallback

# of the learning-rate schedule
NUM_KNOTS = 6


@dataclass
class Proxy:
    """A short run of the configuration, and the space around its hyperparameters."""

    config: RunConfig
    task: EgsTask
    space: HyperSpace

    @classmethod
    def of(cls, config: RunConfig, egs_directory: Path) -> Proxy:
        """Create the proxy run on prepared examples.

        Raises ConfigError unless the optimizer is plain SGD and the schedule exponential.
        """
        import torch

        from ngsgd.data.reader import EgsReader
        from ngsgd.hypergrad import BaseHyperparameters, HyperSpace
        from ngsgd.hypergrad.egs_task import EgsTask
        schedule, optimizer, proxy = config.schedule, config.optimizer, config.tune.proxy
        if optimizer._target_ or optimizer.kind != "sgd":
            raise ConfigError(f"the optimizer is {optimizer.label}, whose steps cannot be reversed; tune with optimizer=sgd "
                              "optimizer.momentum=0.9.")
        if schedule.lr_schedule != "exponential" or schedule.warm_up:
            raise ConfigError("ngsgd tune starts from the exponential schedule without warm-up; set "
                              "schedule.lr_schedule=exponential schedule.warm_up=0.")
        # fixed: another number changes the results bitwise
        torch.set_num_threads(config.cluster.threads_per_worker or 1)
        num_jobs = schedule.num_jobs_final
        steps_per_iter = max(1, proxy.steps // proxy.outer_iters)
        task = EgsTask(config, EgsReader(egs_directory), steps_per_iter=steps_per_iter, num_jobs=num_jobs,
                       num_outer_iters=proxy.outer_iters)
        l2 = 2.0 * schedule.minibatch_size * optimizer.weight_decay / num_jobs
        settings = BaseHyperparameters(schedule.lr_initial * num_jobs, schedule.lr_final * num_jobs, optimizer.momentum, l2,
                                       optimizer.max_change, optimizer.max_param_change)
        space = HyperSpace(settings, tuple(task.layers), steps_per_iter * proxy.outer_iters, num_jobs, proxy.outer_iters,
                           config.tune.space, NUM_KNOTS)
        return cls(config, task, space)

    def evaluate(self, plan: HyperparameterPlan) -> HypergradientRun:
        """Run the proxy once."""
        from ngsgd.hypergrad import evaluate_hyperparameters
        return evaluate_hyperparameters(self.task, plan)


@dataclass(frozen=True)
class Tuned:
    """The best run of a search.

    Attributes:
        valid: its validation loss, minus objf per frame.
        held_out: its loss on frames that the search did not use.
        theta: logarithms of its hyperparameters, in the order of `names`.
        values: its hyperparameters by part of the space, such as `schedule`.
        cost: training runs of the proxy that the search used.
        proxy: steps, jobs, outer iterations and frames of the proxy.
    """

    valid: float
    held_out: float
    theta: list[float]
    names: list[str]
    values: dict[str, list[float]]
    cost: float
    proxy: dict[str, int]


def coarse_searcher() -> tuple[str, Seeder]:
    """Return ("tpe", its function), or ("random", a random search) if Optuna is missing."""
    from ngsgd.hypergrad.search import random_seeder
    return ("tpe", tpe) if importlib.util.find_spec("optuna") else ("random", random_seeder)


def tpe(objective: Callable[[Tensor], float], low_D: Tensor, high_D: Tensor, num_trials: int, seed: int) -> None:
    """Evaluate `objective` at the center of the box and then at points chosen by Optuna's TPE."""
    import optuna
    import torch
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    box = [(str(index), low, high) for index, (low, high) in enumerate(zip(low_D, high_D, strict=True))]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=False))
    with warnings.catch_warnings():
        # experimental since Optuna 2
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.enqueue_trial({name: float((low + high) / 2.0) for name, low, high in box})

    def one(trial: optuna.Trial) -> float:
        point = [trial.suggest_float(name, float(low), float(high)) for name, low, high in box]
        value = objective(torch.tensor(point, dtype=torch.float64))
        # a diverged run is a bad trial, not a failure of the study
        return value if value < float("inf") else 1e9
    study.optimize(one, n_trials=num_trials)


def search(proxy: Proxy, watch: TrialCallback) -> tuple[SearchResult, Tuned]:
    """Tune with the budget of the configuration; return all trials and the best run.

    Raises DataError if all runs diverged.
    """
    import torch

    from ngsgd.hypergrad import final_value, tune_hyperparameters
    tune, space = proxy.config.tune, proxy.space
    found = tune_hyperparameters(
        proxy.evaluate, space, budget=tune.budget, seed_share=tune.coarse_fraction,
        seeder=coarse_searcher()[1], seed=proxy.config.seed, watch=watch)
    best = found.best
    if not math.isfinite(best.value):
        raise DataError("all runs of the proxy diverged; lower schedule.lr_initial, or enable update-norm clipping.")
    theta_D = torch.tensor(best.theta, dtype=torch.float64)
    return found, Tuned(
        best.value, final_value(proxy.task.held_out, space.build(theta_D)), list(best.theta), space.names(),
        space.values(space.clamp(theta_D)), found.spent, proxy={"steps": space.num_steps, "jobs": space.num_jobs,
               "outer_iters": space.num_outer_iters, "frames": proxy.task.num_frames})


def settings_of(config: RunConfig, space: HyperSpace, values: Mapping[str, Sequence[float]], num_jobs: int) -> dict[str, Any]:
    """Return nested settings that reproduce the training of the proxy.

    Learning rates of the proxy are effective ones, and its l2 is per frame.
    """
    found: dict[str, Any] = {"schedule": {}, "optimizer": {"kind": config.optimizer.kind}}
    if "schedule" in values:
        rates = [rate / num_jobs for rate in values["schedule"]]
        middle = math.exp(sum(map(math.log, rates)) / len(rates))
        factors = [rate / middle for rate in rates]
        found["schedule"] = {"lr_initial": middle, "lr_final": middle, "lr_factors": factors}
    if "momentum" in values:
        found["optimizer"]["momentum"] = min(values["momentum"][0], 0.999)
    # half of l2 |w|^2 on the loss summed over a minibatch, versus weight_decay |w|^2 per frame,
    # divided among the jobs
    per_frame = num_jobs / (2.0 * config.schedule.minibatch_size)
    keys = {"layer_lr": ("lr_factor", 1.0), "l2": ("weight_decay", per_frame), "max_change": ("max_change", 1.0)}
    options = {layer: {key: values[part][index] * unit for part, (key, unit) in keys.items()
                       if part in values} for index, layer in enumerate(space.layers)}
    if any(options.values()):
        found["optimizer"]["layer_options"] = options
    if "init_scale" in values:
        found["model"] = {"init_scales": dict(zip(space.layers, values["init_scale"], strict=True))}
    return {section: content for section, content in found.items() if content}
