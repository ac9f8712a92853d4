"""Curvature of a loss by parameter.

BackPACK's quantities, from captured layer inputs and derivatives.
"""

from __future__ import annotations

import warnings
from typing import Any

from ngsgd.curvature.api import collect
from ngsgd.curvature.capture import Capture, LayerCall, Record
from ngsgd.curvature.collection import Collection
from ngsgd.curvature.forms.kronecker import Kronecker
from ngsgd.curvature.products.block import Products
from ngsgd.curvature.quantities import QUANTITIES, Quantities

__all__ = ["QUANTITIES", "Capture", "Collection", "Kronecker", "LayerCall", "Products",
           "Quantities", "Record", "collect"]


def __getattr__(name: str) -> Any:
    if name != "Call":
        raise AttributeError(f"module 'ngsgd.curvature' has no attribute {name!r}")
    warnings.warn("ngsgd.curvature.Call is now LayerCall; the old name will be removed.",
                  DeprecationWarning, stacklevel=2)
    return LayerCall


def __dir__() -> list[str]:
    return sorted(__all__)
