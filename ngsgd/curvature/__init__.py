"""Curvature of a loss by parameter.

BackPACK's quantities, from captured layer inputs and derivatives.
"""

from __future__ import annotations

from ngsgd.curvature.api import collect
from ngsgd.curvature.capture import Capture, LayerCall, Record
from ngsgd.curvature.collection import Collection
from ngsgd.curvature.forms.kronecker import Kronecker
from ngsgd.curvature.products.block import Products
from ngsgd.curvature.quantities import QUANTITIES, Quantities

__all__ = ["QUANTITIES", "Capture", "Collection", "Kronecker", "LayerCall", "Products",
           "Quantities", "Record", "collect"]


def __dir__() -> list[str]:
    return sorted(__all__)
