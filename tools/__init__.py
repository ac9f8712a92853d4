"""Checks of the source tree that run in lint."""
