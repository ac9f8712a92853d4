"""Sequence objectives without knowledge of speech: path sums through graphs, and training."""
