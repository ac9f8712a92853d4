"""Alignments made by a model."""
