"""Checks of a machine and a cluster."""
