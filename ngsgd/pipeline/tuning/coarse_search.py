"""The coarse search over learning rates: Optuna's TPE, or a random search without Optuna."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ngsgd.hypergrad.search import Seeder, random_seeder


def seeder() -> tuple[str, Seeder]:
    """("tpe", it), or ("random", a search at random) where Optuna is missing."""
    return ("tpe", tpe) if importlib.util.find_spec("optuna") else ("random", random_seeder)


def tpe(objective: Callable[[Tensor], float], low_D: Tensor, high_D: Tensor, num_trials: int, seed: int) -> None:
    """Calls `objective` at the middle of the box and then where a tree of Parzen estimators expects the most."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = [str(index) for index in range(len(low_D))]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=False))
    with warnings.catch_warnings():
        # of Optuna 2, for what has stayed since
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.enqueue_trial({name: float((low + high) / 2.0) for name, low, high in zip(names, low_D, high_D, strict=True)})

    def one(trial: optuna.Trial) -> float:
        point = [trial.suggest_float(name, float(low), float(high)) for name, low, high in zip(names, low_D, high_D, strict=True)]
        value = objective(torch.tensor(point, dtype=torch.float64))
        # a run that diverged is a bad one, and no failure of the study
        return value if value < float("inf") else 1e9
    study.optimize(one, n_trials=num_trials)
