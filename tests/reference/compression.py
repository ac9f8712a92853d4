"""The codecs for moves, one element at a time, in exact or float64 arithmetic.

Each function returns the number that an element becomes. Slow on purpose, and nothing here is
shared with the package.
"""

from __future__ import annotations

import math
from fractions import Fraction

LARGEST_BF16 = float((2 - Fraction(1, 2**7)) * 2**127)


def bf16(x: float) -> float:
    """The nearest number with 8 significant bits and exponents from -126 to 127, ties to even; the
    largest if it is beyond.
    """
    if x == 0.0:
        return x
    exponent = max(math.frexp(x)[1] - 1, -126)
    unit = Fraction(2) ** (exponent - 7)
    nearest = float(round(Fraction(x) / unit) * unit)  # Python rounds ties to even
    return math.copysign(min(abs(nearest), LARGEST_BF16), x)


def int8(x: float, peak: float) -> float:
    """The nearest multiple of peak / 127."""
    return round(x / peak * 127.0) * peak / 127.0 if peak else 0.0


def e3m0(x: float, peak: float) -> float:
    """The nearest of 0, peak / 64, peak / 32, .., peak, with the sign of x; the larger of two that
    are as near.
    """
    levels = [0.0] + [peak * 2.0**-k for k in range(7)]
    return math.copysign(min(levels, key=lambda level: (abs(abs(x) - level), -level)), x)


def row_peaks(vector: list[float], lengths: list[int]) -> list[float]:
    """For every element the largest magnitude of its row."""
    peaks, first = [], 0
    for length in lengths:
        row = vector[first:first + length]
        peaks += [max(abs(x) for x in row)] * length if row else []
        first += length
    return peaks
