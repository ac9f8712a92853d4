"""Gradient-based hyperparameter tuning: hypergradients by exact reversal of training.

A hypergradient is the gradient of the validation loss with respect to hyperparameters, such as
every learning rate. The names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngsgd.hypergrad.exact_momentum import Digest, ExactMomentum
    from ngsgd.hypergrad.gradient import HypergradientRun, choose_engine, evaluate_hyperparameters, final_value, hypergradient
    from ngsgd.hypergrad.hyperparameters import HyperGrad, HypergradientReport, HyperparameterPlan
    from ngsgd.hypergrad.reversible_sgd import ReversibleSGD
    from ngsgd.hypergrad.search import SearchResult, SearchTrial, tune_hyperparameters
    from ngsgd.hypergrad.search_space import BaseHyperparameters, HyperSpace
    from ngsgd.hypergrad.training_task import MinibatchIndex, ModuleTask, TrainingTask

_NAMES = {
    "exact_momentum": ("Digest", "ExactMomentum"),
    "gradient": ("HypergradientRun", "choose_engine", "evaluate_hyperparameters", "final_value",
                 "hypergradient"),
    "hyperparameters": ("HyperGrad", "HyperparameterPlan", "HypergradientReport"),
    "reversible_sgd": ("ReversibleSGD",),
    "search": ("SearchResult", "SearchTrial", "tune_hyperparameters"),
    "search_space": ("BaseHyperparameters", "HyperSpace"),
    "training_task": ("MinibatchIndex", "ModuleTask", "TrainingTask"),
}
_HOME_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["BaseHyperparameters", "Digest", "ExactMomentum", "HyperGrad", "HyperSpace",
           "HypergradientReport",
           "HypergradientRun", "HyperparameterPlan", "MinibatchIndex", "ModuleTask",
           "ReversibleSGD", "SearchResult",
           "SearchTrial", "TrainingTask", "choose_engine", "evaluate_hyperparameters",
           "final_value", "hypergradient",
           "tune_hyperparameters"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ngsgd.hypergrad' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ngsgd.hypergrad.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
