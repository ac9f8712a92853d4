"""Hyperparameter search: trials, proxies and their tracking."""
