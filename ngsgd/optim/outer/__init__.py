"""Outer optimizers: the next model from the models of the jobs."""

from ngsgd.optim.outer.optimizer import OuterOptimizer
from ngsgd.optim.outer.rules import Average, BlockMomentum, Bmuf, DiLoCo, OuterInfo, OuterRule, make_rule

__all__ = ["Average", "BlockMomentum", "Bmuf", "DiLoCo", "OuterInfo", "OuterOptimizer", "OuterRule", "make_rule"]
