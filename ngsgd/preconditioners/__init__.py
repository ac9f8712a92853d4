"""Preconditioners that a worker applies to its gradients."""

from ngsgd.preconditioners.fisher import DiagonalNG, FullNG, LayerWiseNG, UnitWiseNG
from ngsgd.preconditioners.gram import SENG, SMWNG
from ngsgd.preconditioners.history import MFAC
from ngsgd.preconditioners.kronecker import EKFAC, KFAC, SKFAC
from ngsgd.preconditioners.maker import DummyObject, GradientMaker
from ngsgd.preconditioners.protocol import Preconditioner
from ngsgd.preconditioners.shampoo import SOAP, Shampoo

# by the name that `preconditioner=` takes
METHODS: dict[str, type[Preconditioner]] = {
    "kfac": KFAC,
    "skfac": SKFAC,
    "ekfac": EKFAC,
    "diagonal": DiagonalNG,
    "unit": UnitWiseNG,
    "layer": LayerWiseNG,
    "full": FullNG,
    "seng": SENG,
    "smw": SMWNG,
    "shampoo": Shampoo,
    "soap": SOAP,
    "mfac": MFAC,
}

__all__ = ["EKFAC", "KFAC", "METHODS", "MFAC", "SENG", "SKFAC", "SMWNG", "SOAP", "DiagonalNG", "DummyObject", "FullNG",
           "GradientMaker", "LayerWiseNG", "Preconditioner", "Shampoo", "UnitWiseNG"]
