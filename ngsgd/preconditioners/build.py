"""The preconditioner that a run's configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from ngsgd.config import PreconditionerConfig, unused_in
from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.states import mean_state


def make_preconditioner(model: nn.Module, config: PreconditionerConfig, seed: int) -> Preconditioner:
    """Of the configured kind, with those of the settings that the method has; `seed` decides its draws.

    Raises:
        KeyError: the kind is "none".
        ConfigError: a setting is not at its default, and the method does not use it.
    """
    method = METHODS[config.kind]
    unused = {setting.path: setting for setting in unused_in(config)}
    if problems := [setting.sentence for setting in unused.values() if setting.is_set]:
        raise ConfigError(problems)
    given = {name: value for name, value in asdict(config).items() if name not in ("kind", "skip", *unused)}
    return method(model, **given, skip=tuple(filter(None, config.skip.replace(" ", "").split(","))), seed=seed)


State = Mapping[str, Mapping[str, Any]]


def mean_of_states(config: PreconditionerConfig) -> Callable[[Sequence[State]], State] | None:
    """What makes one state of all jobs' where the configuration asks for that."""
    return mean_state if config.kind != "none" and config.averaging == "average" else None
