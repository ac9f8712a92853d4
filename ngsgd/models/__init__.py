"""Acoustic models as plain torch modules."""

from ngsgd.models.build import build_model
from ngsgd.models.inputs import DataStatistics, Window
from ngsgd.models.layers import BatchNorm, PNorm, Renormalize

__all__ = ["BatchNorm", "DataStatistics", "PNorm", "Renormalize", "Window", "build_model"]
