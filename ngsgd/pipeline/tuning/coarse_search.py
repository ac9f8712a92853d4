"""The coarse search over learning rates: TPE of Optuna, or a random search without Optuna."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ngsgd.hypergrad.search import Seeder, random_seeder


def seeder() -> tuple[str, Seeder]:
    """Return ("tpe", its function), or ("random", a random search) if Optuna is missing."""
    return ("tpe", tpe) if importlib.util.find_spec("optuna") else ("random", random_seeder)


def tpe(objective: Callable[[Tensor], float], low_D: Tensor, high_D: Tensor, num_trials: int, seed: int) -> None:
    """Evaluate `objective` at the center of the box and then at points chosen by TPE."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = [str(index) for index in range(len(low_D))]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=False))
    with warnings.catch_warnings():
        # experimental since Optuna 2
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.enqueue_trial({name: float((low + high) / 2.0) for name, low, high in zip(names, low_D, high_D, strict=True)})

    def one(trial: optuna.Trial) -> float:
        point = [trial.suggest_float(name, float(low), float(high)) for name, low, high in zip(names, low_D, high_D, strict=True)]
        value = objective(torch.tensor(point, dtype=torch.float64))
        # a diverged run is a bad trial, not a failure of the study
        return value if value < float("inf") else 1e9
    study.optimize(one, n_trials=num_trials)
