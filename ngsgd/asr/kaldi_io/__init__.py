"""Kaldi's table files."""
