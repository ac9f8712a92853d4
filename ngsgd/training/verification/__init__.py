"""Repetition of the counted jobs of a run, compared with their results."""
