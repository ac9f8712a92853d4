"""Hyperparameter tuning by gradient on a short proxy of a run: what `ngsgd tune` computes."""
