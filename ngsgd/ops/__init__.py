"""Tensor functions: natural gradient, GEMMs, averaging, update-norm limits and compression."""
