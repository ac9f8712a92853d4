"""Preconditioners that a worker applies to its gradients."""

from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.gradient_maker import DummyObject, GradientMaker
from ngsgd.preconditioners.methods.fisher import DiagonalNG, FullNG, LayerWiseNG, UnitWiseNG
from ngsgd.preconditioners.methods.hessian.adahessian import AdaHessian
from ngsgd.preconditioners.methods.hessian.hessian_free import HessianFree
from ngsgd.preconditioners.methods.hessian.lbfgs import LBFGS
from ngsgd.preconditioners.methods.kronecker.kbfgs import KBFGS
from ngsgd.preconditioners.methods.kronecker.kfac import EKFAC, KFAC, SKFAC
from ngsgd.preconditioners.methods.kronecker.kfra import KFLR, KFRA
from ngsgd.preconditioners.methods.kronecker.psgd import PSGD
from ngsgd.preconditioners.methods.kronecker.shampoo import SOAP, Shampoo
from ngsgd.preconditioners.methods.kronecker.tnt import TNT
from ngsgd.preconditioners.methods.low_rank.mfac import MFAC
from ngsgd.preconditioners.methods.low_rank.seng_smw import SENG, SMWNG
from ngsgd.preconditioners.methods.low_rank.tonga import TONGA
from ngsgd.preconditioners.methods.online_ng import OnlineNG, SimpleNG
from ngsgd.preconditioners.methods.torch_optimizers import Adam, AdamW, Muon

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
