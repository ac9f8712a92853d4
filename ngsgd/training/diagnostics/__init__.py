"""Figures of a model for people: scores on fixed subsets, gradient noise, curvature by layer."""
