"""Sequence objectives: path sums through graphs of states, and training with them, without
knowledge of speech.
"""
