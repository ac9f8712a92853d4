"""Curvature of a loss, parameter by parameter: BackPACK's quantities, from one capture of layers' inputs and derivatives."""

from ngsgd.curvature.api import collect
from ngsgd.curvature.capture import Call, Capture, Record
from ngsgd.curvature.collection import Collection
from ngsgd.curvature.forms.kronecker import Kronecker
from ngsgd.curvature.products.block import Products
from ngsgd.curvature.quantities import QUANTITIES, Quantities

__all__ = ["QUANTITIES", "Call", "Capture", "Collection", "Kronecker", "Products", "Quantities", "Record", "collect"]
