"""Layers whose backward pass yields the natural-gradient direction of their parameters."""

from __future__ import annotations

import warnings
from typing import Any

from ngsgd.optim.layers.attach import (
    NATURAL_GRADIENT_CLASSES,
    attach,
    detach_all,
    natural_class,
    weight_of,
)
from ngsgd.optim.layers.common import FisherSettings, LayerContext, LayerPreconditioner

__all__ = ["NATURAL_GRADIENT_CLASSES", "FisherSettings", "LayerContext", "LayerPreconditioner",
           "attach", "detach_all", "natural_class", "weight_of"]

# former names, which warn
_RENAMED = {"Settings": FisherSettings, "Shared": LayerContext}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module 'ngsgd.optim.layers' has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"ngsgd.optim.layers.{name} is now {new.__name__}; the old name will be removed.", DeprecationWarning,
                  stacklevel=2)
    return new
