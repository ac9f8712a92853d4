"""Construction of the preconditioner of a run from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from ngsgd.config import OptimizerConfig, unused_in
from ngsgd.preconditioners import METHODS
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.blocks import skipped_parameters
from ngsgd.preconditioners.methods.torch_optimizers import CustomOptimizer, maker
from ngsgd.preconditioners.states import mean_state

# Option of a run -> option of the library class, where the names differ.
LIBRARY_NAMES = {"curvature_state": "averaging", "beta1": "momentum", "decoupled_weight_decay": "weight_decay"}
# Options of SGD, which the classes do not have.
_OF_SGD = ("kind", "_target_", "args", "search_path", "momentum", "max_change", "max_param_change", "weight_decay", "layer_options")


def make_preconditioner(model: nn.Module, config: OptimizerConfig, seed: int, complete: nn.Module | None = None) -> Preconditioner:
    """Create the preconditioner of a run, or raise KeyError for ngsgd and sgd, which have none.

    `skip` may name any module of `complete`, of which layer-wise training has grown `model` so far.
    """
    if config._target_:
        return CustomOptimizer(model, make=maker(config), averaging=config.curvature_state, seed=seed)
    given = {name: getattr(config, name) for name in options_of(config)}
    skip = tuple(filter(None, given.pop("skip").replace(" ", "").split(",")))
    if complete is not None:
        skipped = skipped_parameters(complete, skip)
        skip = tuple(name for name, _ in model.named_parameters() if name in skipped)
    made: Preconditioner = METHODS[config.kind](model, **{LIBRARY_NAMES.get(name, name): value for name, value in given.items()},
                                                skip=skip, seed=seed)
    return made


def options_of(config: OptimizerConfig) -> list[str]:
    """Return the options of a run that its preconditioner uses."""
    unused = {setting.path for setting in unused_in(config)}
    return [spec.name for spec in fields(config) if spec.name not in (*_OF_SGD, *unused)]


State = Mapping[str, Mapping[str, Any]]


def mean_of_states(config: OptimizerConfig) -> Callable[[Sequence[State]], State] | None:
    """Return the function that averages the states of the jobs, if configured."""
    return mean_state if config.preconditions and config.curvature_state == "average" else None
