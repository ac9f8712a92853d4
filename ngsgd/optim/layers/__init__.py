"""Layers whose backward pass yields the natural-gradient direction of their parameters."""

from ngsgd.optim.layers.attach import NATURAL_GRADIENT_CLASSES, attach, detach_all
from ngsgd.optim.layers.common import LayerPreconditioner, Settings, Shared

__all__ = ["NATURAL_GRADIENT_CLASSES", "LayerPreconditioner", "Settings", "Shared", "attach", "detach_all"]
