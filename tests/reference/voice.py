"""Voice perturbation as ngsgd.asr.features.voice defines it, window by window and bin by bin, after
resampling.
"""

from __future__ import annotations

import cmath
import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def moved_and_stretched(x: Array, ratio: float, length: int, size: int, num_ceps: int) -> Array:
    """Speech with its envelope moved from ratio * f to f, stretched to `length` samples."""
    hop, num_bins = size // 4, size // 2 + 1
    window = [0.5 - 0.5 * math.cos(2 * math.pi * n / size) for n in range(size)]
    spectra = [[z * g for z, g in zip(X, _gains(X, ratio, size, num_ceps, _floor(x, size, hop, window)), strict=True)]
               for X in _spectra(x, size, hop, window)]
    speed, phases = len(x) / length, [cmath.phase(z) for z in spectra[0]]
    total, norm = np.zeros(length + 2 * size), np.zeros(length + 2 * size)
    for t in range(length // hop + 1):
        at = min(t * speed, len(spectra) - 1)
        low = min(int(at), len(spectra) - 2)
        a, b, part = spectra[low], spectra[low + 1], at - low
        Y = [((1 - part) * abs(a[f]) + part * abs(b[f])) * cmath.exp(1j * phases[f]) for f in range(num_bins)]
        for f in range(num_bins):
            expected = 2 * math.pi * hop * f / size
            rest = cmath.phase(b[f]) - cmath.phase(a[f]) - expected
            phases[f] += expected + rest - 2 * math.pi * round(rest / (2 * math.pi))
        for n, value in enumerate(_inverse(Y, size)):
            total[t * hop + n] += value * window[n]
            norm[t * hop + n] += window[n] ** 2
    stop = (length // hop) * hop + size
    whole = [total[n] / max(norm[n], 1e-3) if n < stop else 0.0 for n in range(len(total))]
    return np.array(whole[size // 2:size // 2 + length])


def _spectra(x: Array, size: int, hop: int, window: list[float]) -> list[list[complex]]:
    half, found = size // 2, []
    for t in range(len(x) // hop + 1):
        part = [_reflected(x, t * hop - half + n) * window[n] for n in range(size)]
        if t * hop + half > len(x) + half:
            break
        found.append([sum(value * cmath.exp(-2j * math.pi * f * n / size) for n, value in enumerate(part))
                      for f in range(half + 1)])
    return found


def _reflected(x: Array, n: int) -> float:
    if n < 0:
        n = -n
    if n >= len(x):
        n = 2 * (len(x) - 1) - n
    return float(x[n])


def _floor(x: Array, size: int, hop: int, window: list[float]) -> list[float]:
    """Added to magnitudes before their logarithm: 1e-5 of the largest."""
    spectra = _spectra(x, size, hop, window)
    return [1e-5 * max(max(abs(z) for z in X) for X in spectra)] * (size // 2 + 1)


def _gains(X: list[complex], ratio: float, size: int, num_ceps: int, floor: list[float]) -> list[float]:
    half = size // 2
    logs = [math.log(abs(z) + low) for z, low in zip(X, floor, strict=True)]
    both = [logs[f] if f <= half else logs[size - f] for f in range(size)]
    ceps = [sum(both[f] * math.cos(2 * math.pi * f * q / size) for f in range(size)) / size for q in range(num_ceps + 1)]
    envelope = [ceps[0] + 2 * sum(ceps[q] * math.cos(2 * math.pi * f * q / size) for q in range(1, num_ceps + 1))
                for f in range(half + 1)]
    gains = []
    for f in range(half + 1):
        at = min(f * ratio, float(half))
        low = min(int(at), half - 1)
        moved = (1 - (at - low)) * envelope[low] + (at - low) * envelope[low + 1]
        gains.append(math.exp(min(max(moved - envelope[f], -math.log(10.0)), math.log(10.0))))
    return gains


def _inverse(Y: list[complex], size: int) -> list[float]:
    half = size // 2
    return [(Y[0].real + Y[half].real * (-1) ** n
             + 2 * sum((Y[f] * cmath.exp(2j * math.pi * f * n / size)).real for f in range(1, half))) / size
            for n in range(size)]
