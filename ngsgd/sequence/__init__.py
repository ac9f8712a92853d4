"""Objectives over whole sequences: path sums through graphs of states, and what is trained with them.  Knows no speech."""
