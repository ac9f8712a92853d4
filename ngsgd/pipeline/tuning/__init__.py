"""Hyperparameter tuning by gradients on a short proxy of a run (`ngsgd tune`)."""
