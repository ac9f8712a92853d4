"""Preconditioners that a worker applies to its gradients."""

from ngsgd.preconditioners.adahessian import AdaHessian
from ngsgd.preconditioners.fisher import DiagonalNG, FullNG, LayerWiseNG, UnitWiseNG
from ngsgd.preconditioners.gram import SENG, SMWNG
from ngsgd.preconditioners.hessian_free import HessianFree
from ngsgd.preconditioners.history import MFAC
from ngsgd.preconditioners.kaldi import OnlineNG, SimpleNG
from ngsgd.preconditioners.kbfgs import KBFGS
from ngsgd.preconditioners.kfra import KFLR, KFRA
from ngsgd.preconditioners.kronecker import EKFAC, KFAC, SKFAC
from ngsgd.preconditioners.lbfgs import LBFGS
from ngsgd.preconditioners.maker import DummyObject, GradientMaker
from ngsgd.preconditioners.protocol import Preconditioner
from ngsgd.preconditioners.psgd import PSGD
from ngsgd.preconditioners.shampoo import SOAP, Shampoo
from ngsgd.preconditioners.tnt import TNT
from ngsgd.preconditioners.tonga import TONGA
from ngsgd.preconditioners.torch_optimizers import Adam, AdamW, Muon

# by the name that `preconditioner=` takes
METHODS: dict[str, type[Preconditioner]] = {
    "kfac": KFAC,
    "skfac": SKFAC,
    "ekfac": EKFAC,
    "kflr": KFLR,
    "kfra": KFRA,
    "tnt": TNT,
    "diagonal": DiagonalNG,
    "unit": UnitWiseNG,
    "layer": LayerWiseNG,
    "full": FullNG,
    "seng": SENG,
    "smw": SMWNG,
    "shampoo": Shampoo,
    "soap": SOAP,
    "mfac": MFAC,
    "tonga": TONGA,
    "psgd": PSGD,
    "kbfgs": KBFGS,
    "lbfgs": LBFGS,
    "hessian_free": HessianFree,
    "adahessian": AdaHessian,
    "simple": SimpleNG,
    "online": OnlineNG,
    "adam": Adam,
    "adamw": AdamW,
    "muon": Muon,
}

__all__ = ["EKFAC", "KBFGS", "KFAC", "KFLR", "KFRA", "LBFGS", "METHODS", "MFAC", "PSGD", "SENG", "SKFAC", "SMWNG", "SOAP", "TNT",
           "TONGA", "AdaHessian", "Adam", "AdamW", "DiagonalNG", "DummyObject", "FullNG", "GradientMaker", "HessianFree",
           "LayerWiseNG", "Muon", "OnlineNG", "Preconditioner", "Shampoo", "SimpleNG", "UnitWiseNG"]
