"""Preconditioners that a worker applies to its gradients."""
