"""Tensor functions: natural gradient, matrix products, averaging, update-norm limits, compression."""
