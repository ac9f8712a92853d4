"""Preconditioners of gradients for any optimizer."""

from typing import Any

from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.gradient_maker import DummyObject, GradientMaker
from ngsgd.preconditioners.methods.fisher import DiagonalNG, FullNG, LayerWiseNG, UnitWiseNG
from ngsgd.preconditioners.methods.hessian_free import HessianFree
from ngsgd.preconditioners.methods.kbfgs import KBFGS
from ngsgd.preconditioners.methods.kfac import EKFAC, KFAC, SKFAC
from ngsgd.preconditioners.methods.psgd import PSGD
from ngsgd.preconditioners.methods.seng_smw import SENG, SMWNG
from ngsgd.preconditioners.methods.shampoo import SOAP, Shampoo
from ngsgd.preconditioners.methods.simple_ng import SimpleNG
from ngsgd.preconditioners.methods.torch_optimizers import Adam, AdamW, Muon

# The key is the value of `optimizer=`; the arguments depend on it.
METHODS: dict[str, type[Any]] = {
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
    "psgd": PSGD,
    "kbfgs": KBFGS,
    "hessian_free": HessianFree,
    "simple": SimpleNG,
    "adam": Adam,
    "adamw": AdamW,
    "muon": Muon,
}

__all__ = [
    "EKFAC", "KBFGS", "KFAC", "METHODS", "PSGD", "SENG", "SKFAC", "SMWNG", "SOAP", "Adam", "AdamW", "DiagonalNG",
    "DummyObject", "FullNG", "GradientMaker", "HessianFree", "LayerWiseNG", "Muon",
    "Preconditioner", "Shampoo", "SimpleNG", "UnitWiseNG",
]


def __dir__() -> list[str]:
    return sorted(__all__)
