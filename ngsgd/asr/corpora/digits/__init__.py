"""The synthetic digits corpus: speech synthesized locally."""
