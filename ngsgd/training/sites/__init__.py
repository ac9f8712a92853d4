"""Averages over sites: clusters with slow networks between them."""
