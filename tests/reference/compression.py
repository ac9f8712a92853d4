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


def topk(block: list[float], num_sent: int) -> list[float]:
    """The block with its largest magnitudes rounded to two, each with its sign, and zeros
    elsewhere.

    The two are the mean magnitudes of those above the mean of all that are sent, and of the others.
    If fewer are not zero, the largest counts as often as zeros are missing.
    """
    order = sorted(range(len(block)), key=lambda place: -abs(block[place]))
    sent = [place for place in order[:num_sent] if block[place]]
    if not sent:
        return [0.0] * len(block)
    sizes = [abs(block[place]) for place in sent] + [abs(block[sent[0]])] * (num_sent - len(sent))
    middle = sum(sizes) / num_sent
    found = [0.0] * len(block)
    for place in sent:
        group = [size for size in sizes if (size > middle) == (abs(block[place]) > middle)]
        found[place] = math.copysign(sum(group) / len(group), block[place])
    return found
