"""Optimizers for any training loop in one process."""

from ngsgd.optim.natural_muon import NaturalMuon
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.optim.optimizer import Optimizer, StepActivity
from ngsgd.optim.sgd import SGD

__all__ = ["NGSGD", "SGD", "NaturalMuon", "Optimizer", "StepActivity"]
