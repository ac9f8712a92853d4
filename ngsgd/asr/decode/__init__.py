"""Decoding, lattices and word error rates."""
