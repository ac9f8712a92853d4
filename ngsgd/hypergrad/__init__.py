"""Gradient-based hyperparameter tuning: hypergradients by exact reversal of training.

A hypergradient is the gradient of the validation loss with respect to hyperparameters, such as
every learning rate.
"""

from ngsgd.hypergrad.exact_momentum import Digest, ExactMomentum
from ngsgd.hypergrad.gradient import HypergradientRun, choose_engine, evaluate_hyperparameters, final_value, hypergradient
from ngsgd.hypergrad.hyperparameters import HyperGrad, HypergradientReport, HyperparameterPlan
from ngsgd.hypergrad.reversible_sgd import ReversibleSGD
from ngsgd.hypergrad.search import BaseHyperparameters, HyperSpace, SearchResult, SearchTrial, tune_hyperparameters
from ngsgd.hypergrad.training_task import MinibatchIndex, ModuleTask, TrainingTask

__all__ = ["BaseHyperparameters", "Digest", "ExactMomentum", "HyperGrad", "HyperSpace", "HypergradientReport",
           "HypergradientRun", "HyperparameterPlan", "MinibatchIndex", "ModuleTask", "ReversibleSGD", "SearchResult",
           "SearchTrial", "TrainingTask", "choose_engine", "evaluate_hyperparameters", "final_value", "hypergradient",
           "tune_hyperparameters"]


def __dir__() -> list[str]:
    return sorted(__all__)
