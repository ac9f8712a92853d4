"""Preconditioners that a worker applies to its gradients."""

from ngsgd.preconditioners.fisher import DiagonalNG, FullNG, LayerWiseNG, UnitWiseNG
from ngsgd.preconditioners.gram import SENG, SMWNG
from ngsgd.preconditioners.kronecker import EKFAC, KFAC, SKFAC
from ngsgd.preconditioners.protocol import Preconditioner

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
}

__all__ = ["EKFAC", "KFAC", "METHODS", "SENG", "SKFAC", "SMWNG", "DiagonalNG", "FullNG", "LayerWiseNG", "Preconditioner", "UnitWiseNG"]
