"""Acoustic models: plain torch modules."""

from ngsgd.models.dnn import build_model
from ngsgd.models.layers import PNorm, Renormalize

__all__ = ["PNorm", "Renormalize", "build_model"]
