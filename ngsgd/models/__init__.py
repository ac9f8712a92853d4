"""Acoustic models as plain torch modules."""

from ngsgd.models.build import build_model
from ngsgd.models.layers import BatchNorm, DataStatistics, PNorm, Renormalize, Window

__all__ = ["BatchNorm", "DataStatistics", "PNorm", "Renormalize", "Window", "build_model"]
