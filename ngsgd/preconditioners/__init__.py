"""Preconditioners of gradients for any optimizer."""

from typing import Any

from ngsgd.config.traits import TRAITS
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.fisher_method import SimpleNG
from ngsgd.preconditioners.gradient_maker import DummyObject, GradientMaker
from ngsgd.preconditioners.methods.combination import Method
from ngsgd.preconditioners.methods.kbfgs import KBFGS
from ngsgd.preconditioners.methods.kfac import EKFAC, KFAC, KFRA, SKFAC, TNT
from ngsgd.preconditioners.methods.named import (
    ESGD,
    FANG,
    GGT,
    MFAC,
    SFN,
    TONGA,
    AdaHessian,
    DiagonalNG,
    FullNG,
    LayerWiseNG,
    UnitTONGA,
    UnitWiseNG,
)
from ngsgd.preconditioners.methods.parameter_history import LBFGS, Neumann
from ngsgd.preconditioners.methods.psgd import PSGD
from ngsgd.preconditioners.methods.second_derivatives import KSD, HessianFree, LiSSA
from ngsgd.preconditioners.methods.seng_smw import SENG, SMWNG
from ngsgd.preconditioners.methods.shampoo import SOAP, Shampoo
from ngsgd.preconditioners.methods.torch_optimizers import Adam, AdamW, Muon

# The key is the value of `optimizer=`; the arguments depend on it.
METHODS: dict[str, type[Any]] = {kind: Preconditioner.kinds[kind] for kind in TRAITS}

__all__ = [
    "EKFAC", "ESGD", "FANG", "GGT", "KBFGS", "KFAC", "KFRA", "KSD", "LBFGS", "METHODS", "MFAC",
    "PSGD", "SENG", "SFN", "SKFAC", "SMWNG", "SOAP", "TNT", "TONGA", "AdaHessian", "Adam", "AdamW",
    "DiagonalNG", "DummyObject", "FullNG", "GradientMaker", "HessianFree", "LayerWiseNG", "LiSSA",
    "Method", "Muon", "Neumann", "Preconditioner", "Shampoo", "SimpleNG", "UnitTONGA",
    "UnitWiseNG",
]


def __dir__() -> list[str]:
    return sorted(__all__)
