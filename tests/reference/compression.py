"""The codecs for parameter deltas, one element at a time, in float64."""

from __future__ import annotations

import math


def int8(row: list[float]) -> list[float]:
    """The nearest multiples of peak / 127."""
    peak = max(map(abs, row))
    return [round(x / peak * 127.0) * peak / 127.0 if peak else 0.0 for x in row]


def sparse(row: list[float], group_length: int) -> list[float]:
    """The row with the largest element of each group rounded to a common magnitude, and zeros
    elsewhere.

    The magnitude is the mean of the largest elements, each with its size as weight; elements below
    half of it are zero.
    """
    largest = []
    for first in range(0, len(row), group_length):
        group = row[first:first + group_length]
        place = max(range(len(group)), key=lambda at: (abs(group[at]), -at))
        if group[place]:
            largest.append(first + place)
    found = [0.0] * len(row)
    if largest:
        magnitude = sum(row[at] ** 2 for at in largest) / sum(abs(row[at]) for at in largest)
        for at in largest:
            if abs(row[at]) >= 0.5 * magnitude:
                found[at] = math.copysign(magnitude, row[at])
    return found
