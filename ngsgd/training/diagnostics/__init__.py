"""Evaluation of committed models in the background, and the records that wait for it."""
