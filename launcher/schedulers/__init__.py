"""Batch systems: Slurm and Kubernetes."""
