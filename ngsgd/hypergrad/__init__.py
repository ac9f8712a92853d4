"""Hyperparameters by gradient: training that is undone bit for bit, and what the validation loss owes to every learning rate.

The names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngsgd.hypergrad.exact_momentum import Digest, ExactMomentum
    from ngsgd.hypergrad.gradient import Evaluation, choose_engine, evaluate, final_value, hypergradient
    from ngsgd.hypergrad.hyperparameters import HyperGrad, Plan, Report
    from ngsgd.hypergrad.reversible_sgd import ReversibleSGD
    from ngsgd.hypergrad.search import Search, Trial, tune
    from ngsgd.hypergrad.search_space import HyperSpace, Settings
    from ngsgd.hypergrad.training_task import ModuleTask, Place, Task

_NAMES = {
    "exact_momentum": ("Digest", "ExactMomentum"),
    "gradient": ("Evaluation", "choose_engine", "evaluate", "final_value", "hypergradient"),
    "hyperparameters": ("HyperGrad", "Plan", "Report"),
    "reversible_sgd": ("ReversibleSGD",),
    "search": ("Search", "Trial", "tune"),
    "search_space": ("HyperSpace", "Settings"),
    "training_task": ("ModuleTask", "Place", "Task"),
}
_HOME_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["Digest", "Evaluation", "ExactMomentum", "HyperGrad", "HyperSpace", "ModuleTask", "Place", "Plan", "Report",
           "ReversibleSGD", "Search", "Settings", "Task", "Trial", "choose_engine", "evaluate", "final_value", "hypergradient",
           "tune"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ngsgd.hypergrad' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ngsgd.hypergrad.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
