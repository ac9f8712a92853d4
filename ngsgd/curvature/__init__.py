"""Curvature of a loss, parameter by parameter: BackPACK's quantities, from one capture of layers' inputs and derivatives."""

from ngsgd.curvature.capture import Call, Capture, Record
from ngsgd.curvature.collection import QUANTITIES, Collection, Quantities, collect
from ngsgd.curvature.kronecker import Kronecker

__all__ = ["QUANTITIES", "Call", "Capture", "Collection", "Kronecker", "Quantities", "Record", "collect"]
