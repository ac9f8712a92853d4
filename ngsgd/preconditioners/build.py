"""The preconditioner that a run's configuration names."""

from __future__ import annotations

from dataclasses import asdict, fields

from torch import nn

from ngsgd.config import PreconditionerConfig
from ngsgd.preconditioners import METHODS
from ngsgd.preconditioners.protocol import Preconditioner


def make_preconditioner(model: nn.Module, config: PreconditionerConfig, seed: int) -> Preconditioner:
    """Of the configured kind, with those of the settings that the method has; `seed` decides its draws.

    Raises:
        KeyError: the kind is "none".
    """
    method = METHODS[config.kind]
    known = {field.name for field in fields(method.Options)}
    given = {name: value for name, value in asdict(config).items() if name in known}
    return method(model, **given, seed=seed)
