"""Quantities from second derivatives."""
