"""Curvature of a loss by parameter: BackPACK's quantities, from rows at the layers."""

from __future__ import annotations

from ngsgd.curvature.capture import Capture
from ngsgd.curvature.collection import Collection, collect
from ngsgd.curvature.forms.kronecker import Kronecker
from ngsgd.curvature.layers import LayerCall, Record
from ngsgd.curvature.products import Products
from ngsgd.curvature.quantities import QUANTITIES, Quantities

__all__ = ["QUANTITIES", "Capture", "Collection", "Kronecker", "LayerCall", "Products", "Quantities", "Record", "collect"]


def __dir__() -> list[str]:
    return sorted(__all__)
