"""Layers whose backward pass yields the natural-gradient direction of their parameters."""

from __future__ import annotations

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
