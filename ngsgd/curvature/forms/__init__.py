"""Representations of per-sample gradients and Kronecker factors."""
