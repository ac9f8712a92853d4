"""Prediction of the duration of a run: a probe of this machine, formulas, a simulated cluster."""
