"""Slow float64 twins, written from formulas and definitions; they share no code with ngsgd."""
